"""SGLang's model class of the family that an engine serves, as its "external model
package", which it searches first. Otherwise SGLang imports all of its model files,
which takes 3 CPU-seconds."""

MODEL_TYPE_VARIABLE = "INVRL_MODEL_TYPE"
"""Environment variable of an engine that names the family, by `model_type`."""
