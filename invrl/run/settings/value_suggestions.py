"""Suggestions for a wrong value of a setting: one with nearly equal spelling, or the
setting that the value belongs to, such as an objective given as a preset. Pure."""

import difflib
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from invrl.algorithms.advantages.advantages import ADVANTAGES
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.objectives.objectives import ON_FILES, ON_ROLLOUTS
from invrl.algorithms.policy_loss.axis_plugins import BUILT_IN_OLD_POLICIES
from invrl.algorithms.policy_loss.policy_losses import POLICY_LOSSES
from invrl.algorithms.tables import KlConfig, RejectionConfig
from invrl.datasets.config import KIND_OF_OBJECTIVE
from invrl.run.settings.former_settings import FORMER_VALUES
from invrl.types.section import is_optional, present_type

_NAMES: dict[str, tuple[str, ...]] = {
    "objective": (*ON_ROLLOUTS, *ON_FILES),
    "advantage": tuple(ADVANTAGES),
    "policy_loss": tuple(POLICY_LOSSES),
    "old_logprobs": BUILT_IN_OLD_POLICIES,
}
"""Built-in names of settings of [algorithm] that also take an import path."""


def value_fix(name: str, value: object, field: FieldInfo) -> str:
    """Return a fix for a wrong value of the setting of this name: the nearest value, or
    the setting that the value belongs to, or what the setting is."""
    fix = f"set {name}: {field.description}"
    if field.default is not None and not field.is_required():
        fix += f" (default: {field.default!r})"
    if is_optional(field) and value in (0, "0", "", "none"):
        return f"leave it out, or write --no-{name.replace('_', '-')}; or {fix}"
    choices = literal_choices(present_type(field))
    if not choices or not isinstance(value, str):
        return fix
    if name in AlgorithmConfig.model_fields:
        misplaced = misplaced_value(name, value)
        if misplaced:
            return misplaced
    return f"{nearest_value(value, choices)} {fix}".strip()


def literal_choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a field of this type takes, itself or in its tuple; empty
    if it takes others too."""
    if get_origin(annotation) is Literal:
        return tuple(choice for choice in get_args(annotation) if choice)
    if get_origin(annotation) is tuple:
        return literal_choices(get_args(annotation)[0])
    return ()


def nearest_value(value: str, choices: tuple[str, ...]) -> str:
    """Return a question that names the choice nearest to the value; "" if none is
    near."""
    plain = {choice.lower().replace("-", "_"): choice for choice in choices}
    close = difflib.get_close_matches(
        value.lower().replace("-", "_"), list(plain), n=1, cutoff=0.5
    )
    return f"did you mean {plain[close[0]]}?" if close else ""


def misplaced_value(key: str, value: str) -> str:
    """Return a sentence for a name that belongs to another setting of [algorithm]; ""
    for any other value."""
    owners = [
        owner
        for owner, names in _names_by_setting().items()
        if value in names and owner != key
    ]
    if not owners:
        return ""
    flags = " or ".join(f"--{owner.replace('_', '-')} {value}" for owner in owners)
    if owners == ["objective"]:
        sentence = f"{value} is an objective: write {flags}"
        if value in KIND_OF_OBJECTIVE:
            sentence += f" --data-path FILE.jsonl, with {KIND_OF_OBJECTIVE[value]}"
        return sentence
    return f"{value} is a value of {' and '.join(owners)}: write {flags}"


def wrong_name(key: str, value: str) -> str:
    """Return a fix for a name that is not a built-in of a setting that also takes an
    import path: its present value, the setting that it belongs to, or an objective with
    a similar spelling. "" for a value that may be an import path, which loading
    explains."""
    former = FORMER_VALUES.get(key, {}).get(value)
    if former is not None:
        return f"it moved: write --{key.replace('_', '-')} {former}"
    if value in _NAMES[key] or not value.isidentifier():
        return ""
    misplaced = misplaced_value(key, value)
    if misplaced or key != "objective":
        return misplaced
    near = nearest_value(value, _NAMES[key])
    return near or f"use one of: {', '.join(_NAMES[key])}; or module:name"


def _names_by_setting() -> dict[str, tuple[str, ...]]:
    names = dict(_NAMES)
    for key in ("algorithm_preset", "correction", "aggregation"):
        names[key] = literal_choices(present_type(AlgorithmConfig.model_fields[key]))
    names["rejection"] = literal_choices(
        RejectionConfig.model_fields["kind"].annotation
    )
    names["kl.estimator"] = literal_choices(
        KlConfig.model_fields["estimator"].annotation
    )
    return names
