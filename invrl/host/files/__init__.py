"""Files and folders of one machine: durable writes, full disks, private and temporary
files."""
