"""What a process writes: its log, the terminal, incidents and traces, with keys
masked."""
