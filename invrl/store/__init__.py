"""What a run writes down: the run folder, its SQLite store, task leases, batches, metrics and manifests.

May import `host`. Start with `run_store.py`.
"""
