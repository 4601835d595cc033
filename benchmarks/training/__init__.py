"""The trainer's speed. `trainer.py` is the parent of the measurement; `step_program.py`
and `rank_program.py` are the processes that it starts, one measurement at a time.
"""
