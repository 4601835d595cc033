"""The gateway's processes and its HTTP surface: the application, the workers and what supervises them.

Start with `app.py`; `gateway_server.py` is what the driver holds.
"""
