"""From the groups of a batch to a TrainBatch: rewards that are compared, and
samples."""
