"""The application of a worker: the routes of agents and those of sessions.

Start with `app.py`; `agent_api.py` is the hot path.
"""
