"""The interface between a run's supervisor and its drivers: the inner commands of
`invrl.cli` that a driver process runs, and the exit codes of all commands. Imports
nothing, so that `invrl --help` stays fast."""

INCARNATION_COMMAND = "_incarnation"
"""Runs one incarnation of the run in a folder."""
EVALUATION_COMMAND = "_evaluation"
"""Runs the evaluation in a folder."""
REPLAY_COMMAND = "_replay"
"""Repeats one training step of the run in a folder."""

FAILURE_EXIT = 1
USAGE_EXIT = 2
"""Bad input: a flag, file or setting that the user must change."""
INTERRUPT_EXIT = 130
"""Exit code that shells report for a process ended by SIGINT."""
