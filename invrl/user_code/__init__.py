"""User input: functions, paths and model folders, checked before a run starts.

Every package may import this one. It imports only `types`, `interfaces` and `errors`.
"""
