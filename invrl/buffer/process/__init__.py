"""The buffer's process: its Ray actor, and what other processes hold of it."""
