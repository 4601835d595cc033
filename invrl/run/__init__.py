"""Assembly of a run: its settings, processes, loop and checkpoints.

May import every package but `cli`. Its rooms from the ground up; each may import those
before it:

    checkpoints/    what is saved and when, and where a run that resumes begins
    settings/       all settings, their contradictions, the folder of a run
    hosts/          the nodes of a Ray cluster that a run uses
    processes/      the processes in the order in which they start, and what is measured
                    of them; the supervisor above the drivers
    loop/           each step of the loop, weight updates, held-out evaluations
    plan/           what a run would take, on a clock that jumps
    exports/        rollouts as rows of a data file
    incarnations/   one incarnation of a run, from its start to its end

Where to look:

    each step of the loop             loop/loop.py
    the processes in order            processes/cluster.py, processes/ray_session.py
    `invrl train`                     incarnations/incarnation.py; the other commands are
                                      in cli/commands/
    resume                            checkpoints/resume.py
    when the driver dies              processes/supervisor.py
    when an engine dies               loop/weight_updater.py, and engines/fleet/fleet.py
    the order of a weight update      weights/update/transaction.py; loop/weight_updater.py runs it
    evaluation                        loop/held_out.py (in training),
                                      cli/commands/evaluate.py (`invrl eval`)
    failed rollouts on the console    loop/failed_rollouts.py
"""
