"""User code and its execution: tasks, sessions, workers, rewards and held-out
evaluation.

May import `host` and `store`; it talks to the gateway over HTTP only. Start with
`workers/runner.py`.
"""
