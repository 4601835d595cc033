"""SGLang's classes of the model families that the trainer knows. As its "external model
package" they are found first. Otherwise SGLang imports all of its model files, which takes 3 CPU-seconds."""
