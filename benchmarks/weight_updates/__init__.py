"""Updates of an engine's weights. `measurement.py` starts an engine, and
`loader_program.py`, which is the end of an update inside an engine without the engine.
"""
