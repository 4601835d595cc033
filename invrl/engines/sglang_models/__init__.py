"""SGLang's class of the model family that an engine serves. As its "external model
package" it is found first. Otherwise SGLang imports all of its model files, which takes
3 CPU-seconds."""

MODEL_TYPE_VARIABLE = "INVRL_MODEL_TYPE"
"""The environment variable of an engine that names the family, by `model_type`."""
