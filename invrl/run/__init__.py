"""Assembly of a run: its settings, processes, loop and checkpoints.

May import every package but `cli`. Where to look:

    each step of the loop             loop.py
    the processes in order            cluster.py, ray_session.py
    the bodies of the commands        train.py, evaluate.py, serve.py, replay.py
    all settings                      config.py, contradictions.py, name_suggestions.py
    resume                            resume.py, checkpoints.py, store_check.py
    what is saved, and when           checkpoints.py, save_schedule.py, unsaved_weights.py
    when the driver dies              supervisor.py
    when an engine dies               weight_updater.py, and engines/fleet.py
    the order of a weight update      weights/transaction.py, which weight_updater.py runs
    evaluation                        held_out.py (in training), evaluate.py (`invrl eval`)
    failed rollouts on the console    failed_rollouts.py
"""
