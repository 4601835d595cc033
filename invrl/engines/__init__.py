"""SGLang servers and the router: their processes, their clients, and the fleet that
holds them together.

May import `host` and `weights`. Start with `fleet.py`; the requests to SGLang are in
`sglang_client.py`.
"""
