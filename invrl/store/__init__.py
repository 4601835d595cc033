"""Files of a run: the run folder, its SQLite store, task leases, batches, metrics and
manifests; and the rows of files that users write.

May import `host`. Start with `run_store.py`.
"""
