"""SGLang's classes of the model families that the trainer knows. Named as its "external model package", it
finds these first: otherwise it imports all of its model files, which takes 3 CPU-seconds."""
