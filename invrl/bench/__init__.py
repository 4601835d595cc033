"""What `invrl bench` measures: ratios of two measurements of one run, and their
history.

`trainer.py` is the parent of the measurement of the trainer. `step_program.py` and
`rank_program.py` are the processes that it starts, one measurement at a time.
`weights.py` measures updates of an engine's weights; it starts an engine, and
`loader_program.py`, which is the end of an update inside an engine without the engine.
"""
