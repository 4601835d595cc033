"""The error for a field of config.json that describes a model which the trainer does
not compute."""

from invrl.errors import ConfigError


def refused(name: str, value: object, why: str) -> ConfigError:
    """Return the error for the field `name` of config.json."""
    reason = f"the trainer does not support it ({why})"
    return ConfigError(f"config.json: {name}", value, reason, "use another model")
