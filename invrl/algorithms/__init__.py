"""The algorithm as independent axes, one small file each: advantage x ratio level x surrogate x off-policy
correction x aggregation x KL. Pure functions, dataclass in and dataclass out; no torch.distributed: the
caller passes global denominators and adds up what micro-batches and ranks return."""
