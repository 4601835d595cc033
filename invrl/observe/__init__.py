"""A person's view of a run: metrics sinks, progress, and samples of the model's
replies.

May import `store`, `host`, `buffer` and the gateway's types. Its rooms
from the ground up; each may import those before it:

    samples/    rollouts as a person reads them
    sinks/      where phases, metrics and messages go
    metrics/    the numbers of a step and of a run, and what Prometheus scrapes
    status/     what a run does and what came of it, read from its files
    screen/     what a terminal shows of a run

Start with `sinks/sinks.py`.
"""
