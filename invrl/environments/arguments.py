"""Arguments of an environment: texts `name=value`, read as the program declares
them."""

import difflib
from collections.abc import Callable, Mapping, Sequence

from invrl.environments.environment_folder import EnvironmentFolder
from invrl.environments.installation import Argument, Value, describe
from invrl.errors import ConfigError

_SWITCH = {"true": True, "false": False}
_READ: Mapping[str, Callable[[str], Value]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: _SWITCH[text.lower()],
}


def read_environment_arguments(
    field: str, environment: EnvironmentFolder, texts: Sequence[str]
) -> dict[str, Value]:
    """Return the values of an installed environment's arguments. Raises ConfigError
    about `field`, with the valid arguments."""
    if not texts:
        return {}
    return read_values(field, describe(environment).arguments, texts)


def read_values(
    field: str, known: Mapping[str, Argument], texts: Sequence[str]
) -> dict[str, Value]:
    """Return the values that texts `name=value` give to known arguments. Raises
    ConfigError."""
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            fix = f"write name=value; the arguments: {_listed(known)}"
            raise ConfigError(field, text, "an argument has a name and a value", fix)
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"the arguments: {_listed(known)}"
            if close:
                fix = f"did you mean {close[0]}? {fix}"
            raise ConfigError(field, text, f"no argument is called {name!r}", fix)
        try:
            values[name] = _READ[known[name].type](value)
        except (ValueError, KeyError) as error:
            reason = f"{name} is not of the type {known[name].type}"
            fix = f"the arguments: {_listed(known)}"
            raise ConfigError(field, text, reason, fix) from error
    return values


def _listed(known: Mapping[str, Argument]) -> str:
    arguments = (
        f"{name}={argument.default} ({argument.type})"
        for name, argument in known.items()
    )
    return ", ".join(arguments) or "none"
