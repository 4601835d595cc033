"""The one public port: it knows every session, owns its tokens and records what was sampled.

May import `host`, `store` and the engines' client. The packages inside import in one direction: `server`
→ `sessions`, `dialects` → `turns` → `rendering` → `registry.py`, `types.py`. Start with
`turns/turns.py`.
"""
