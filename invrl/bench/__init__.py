"""What `invrl bench` measures: ratios of speeds that are taken in turns in one run, and their history.

`trainer.py` is the parent of the measurement; `step_program.py` and `rank_program.py` are the processes that
it starts, one measurement at a time.
"""
