"""SGLang servers and the router: their processes, their clients, and the fleet that
holds them together.

May import `host` and `weights`. The rooms from the ground up:

=================  =====================================================================
room               what it holds
=================  =====================================================================
`sglang_models/`   our families' classes for SGLang
`inside_sglang/`   code in an engine's own processes: its start, patches and routes
`client/`          requests to an engine, checks of the replies, the receiver of weights
`router/`          the process of the router, sglang-router or smg
`launch/`          one engine: its options, its process, or one that others have started
`fleet/`           all of them together, and the watch over them; start with `fleet.py`
=================  =====================================================================
"""
