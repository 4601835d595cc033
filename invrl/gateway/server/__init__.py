"""The gateway's processes and its HTTP interface: the supervisor, the workers and their
application.

Start with `routes/app.py`. `routes/agent_api.py` is the hot path; the driver holds
`processes/gateway_server.py`.
"""
