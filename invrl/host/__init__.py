"""Processes and files on one machine: starting, watching and ending processes, signals,
Ray's environment, disks.

Imports only the top-level modules of `invrl/`. The rooms from the ground up: `output`,
`files`, `network`, `processes` and `ray`. Start with `processes/process.py`.

What we start, we end. No single mechanism can do that: a killed process runs no code,
the kernel signals only direct children, and a dead ancestor adopts nobody. Each death
has its mechanism:

============================  ======================================================================
what happens                  what ends the processes below it
============================  ======================================================================
a command ends, fails, or     the command: `interrupts.CleanUp` runs the clean-up, in which
gets SIGINT, SIGTERM, SIGHUP  `ServerProcess.stop` ends each server and Ray's shutdown ends the
                              actors. `interrupts.py` ends the process after 120 s; what is left
                              below ends as after kill -9.
the driver hangs              `lifeline.py` carries the driver's heartbeat. The supervisor
                              (`run/processes/supervisor.py`) kills a silent driver; the rest
                              as after kill -9.
kill -9 of the driver         the kernel kills its servers: its children by
                              `descendants.die_with_parent`, and what a `fork_parent.py` has forked
                              for it by the pipe in `forked_process.py`. The
                              supervisor has adopted everything else, Ray's processes and daemons in
                              sessions of their own too, and kills it (`descendants.end_descendants`).
Ray's raylet or GCS ends      `ray_watch.py` ends the driver with the cause; the rest as after
or hangs                      kill -9.
kill -9 of the supervisor,    the kernel kills the driver, and with it the servers. Nobody has adopted
or of a driver without one    Ray's processes then. The driver's `guardian.py`, which outlives it,
                              kills what it has seen below the driver or what bears its mark.
a rollout worker ends or      Ray ends the worker's process group; the worker's own guardian ends
is killed                     what user code has put into another session. What has escaped both
                              ends with the incarnation, by the supervisor.
a process that forks dies     nothing: what it has forked continues, and the next fork starts
                              another one.
a gateway process dies        the kernel kills the workers of a dead gateway supervisor
                              (`descendants.die_with_parent`); a dead worker has no children.
kill -9 of a launch script,   `launch/run_contained.py`, by the same `descendants.py` as the
or of what it calls           supervisor. It covers the installation too, before invrl is there.
============================  ======================================================================

A process that hangs is found by its silence, which is measured by
`awake_time.Stopwatch`: a driver's in its `lifeline.py`, Ray's own processes' by
`ray_watch.py`, an actor's by `actor_heartbeat.py`, a gateway process's in the gateway's
`heartbeat_page.py`. Engines and the router, which are not our code, are polled over
HTTP (`engines/fleet/engine_health.py`).

The guardian cannot use `descendants.py`: it must outlive the process that it watches,
so it is not an ancestor that could adopt orphans. The watched process cannot adopt them
either: it would have to reap them, in conflict with user code that waits for its own
children.
"""
