"""Input of a user: functions, paths and model folders, checked before a run starts.

Every package may import this one. It imports `types`, `interfaces` and `errors` alone.
"""
