"""The trainer: Megatron-core ranks that take batches and produce new weights.

May import `host`, `store`, `weights`, `families` and `algorithms`. Start with
`step/train_step.py`; `trainer/train_rank.py` is one rank. Its rooms, from the top down;
each imports only those below it:

    trainer    the policy's ranks, and all ranks behind one handle
    step       one training step
    critic     the critic, also on separate ranks
    ranks      parts of every rank: actor, calls, its share of a checkpoint
    model      a model, its schedule and its optimizer
    layers     the parts of a decoder layer
    weights    weights in and out
    parallel   what ranks divide and exchange
    batches    from a batch to micro-batches
    cost       estimates, before anything is loaded
    runtime    the machine: CPU or CUDA, torch, Megatron

The files next to them are a trainer's settings. Every room may import those; they
import no room, and no torch.
"""
