"""The state machine from tasks to batches: admission, filters, and what it waits for.

Start with `group_buffer.py`.
"""
