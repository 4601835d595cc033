"""The gateway's processes and its HTTP interface: the supervisor, the workers and their
application.

Start with `app.py`. `agent_api.py` is the hot path; the driver holds
`gateway_server.py`.
"""
