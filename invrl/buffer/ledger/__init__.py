"""The state of every rollout: the ledger, its store, and the groups that have not
ended."""
