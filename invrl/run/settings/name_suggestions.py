"""Suggests the setting that a wrong name stands for: by its spelling, or by other
trainers' names for it. Pure."""

import difflib
import re
from collections.abc import Iterable, Mapping

from invrl.run.settings.former_settings import (
    FORMER_NAMES,
    REMOVED_SETTINGS,
    former_fix,
)
from invrl.run.settings.other_trainers import (
    ANSWERS,
    ON_FILES,
    ON_ROLLOUTS,
    OTHER_TRAINERS,
)
from invrl.train.runtime.megatron_args import fix_of_field

_OURS = {
    foreign: ours for ours, names in OTHER_TRAINERS.items() for foreign in names.split()
}
_SHORTEST_WORD = 5
"""Letters of a word that counts: "max", "num" and "path" are part of too many names."""
_MOST_SHOWN = 3


def nearest(
    name: str, names: Iterable[str], many: str = "see --help for the valid names"
) -> str:
    """Return a fix for a wrong name: the closest valid name. If none is close, the list
    of all; if that is too long, `many`."""
    valid = sorted(names)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    if len(valid) > 30:
        return many
    return f"use one of: {', '.join(valid)}"


def nearest_setting(name: str, names: Iterable[str], *, on_file: bool = False) -> str:
    """Return the settings, or flags, that a wrong name may stand for, as a fix; or the
    alternative if there is none. `on_file`: of a run that trains on a file."""
    valid = {_plain(valid_name): valid_name for valid_name in names}
    new_name = FORMER_NAMES.get(_plain(name), "")
    if new_name in valid:
        return f"it was renamed: write {valid[new_name]}"
    if new_name.startswith("plugin.") or _plain(name) in REMOVED_SETTINGS:
        return former_fix(name)
    answer = answer_without_setting(name)
    if answer:
        return answer
    near = near_settings(name, valid.values(), on_file=on_file)
    if not near:
        return "see --help for the valid names"
    return f"did you mean {' or '.join(near)}?"


def answer_without_setting(name: str) -> str:
    """Return the alternative to a setting that other trainers or Megatron have and that
    does not exist here; "" for any other name."""
    for spelling in _spellings(name):
        if spelling in ANSWERS:
            return ANSWERS[spelling]
        if spelling in _OURS:
            break
        fix = fix_of_field(spelling)
        if fix:
            return fix
    return ""


def meant_setting(name: str) -> str:
    """Return our name for another trainer's setting; "" if no trainer is known to have
    one."""
    for spelling in _spellings(name):
        if spelling in _OURS:
            return _OURS[spelling]
    return ""


def near_settings(
    name: str, names: Iterable[str], *, on_file: bool = False
) -> list[str]:
    """Return the valid `names` that a wrong name may stand for, by the first rule that
    finds any: the same name with its table; other trainers' names for it; nearly equal
    spelling; shared words; the most similar spelling. Empty if nothing is near."""
    valid = {_plain(valid_name): valid_name for valid_name in names}
    without_dots = {plain.replace(".", "_"): plain for plain in valid}
    for spelling in _spellings(name):
        if spelling in without_dots:
            return [valid[without_dots[spelling]]]
        meant = _for_run(_OURS.get(spelling, ""), valid, on_file=on_file)
        if meant:
            return meant
    wanted = _plain(name)
    with_key = [
        plain
        for plain in valid
        if plain.endswith(f".{wanted}") and not plain.startswith("no_")
    ]
    if len(with_key) == 1:
        return [valid[with_key[0]]]
    meant = _for_run(_meant_by_misspelt(wanted, valid), valid, on_file=on_file)
    if meant:
        return meant
    near = (
        difflib.get_close_matches(wanted, list(valid), n=1, cutoff=0.75)
        or _sharing_words(wanted, valid)
        or difflib.get_close_matches(wanted, list(valid), n=1, cutoff=0.7)
    )
    return [valid[plain] for plain in near]


def _for_run(ours: str, valid: Mapping[str, str], *, on_file: bool) -> list[str]:
    """Return the valid settings that stand for `ours` in a run on a file. In any other
    run, a setting of files comes last: the run may be meant to be one on a file."""
    names = [ours]
    if on_file:
        names = [ON_FILES.get(ours, ours)]
    elif ours in ON_ROLLOUTS:
        names = [ON_ROLLOUTS[ours], ours]
    return [valid[name] for name in names if name in valid]


def _spellings(name: str) -> list[str]:
    """Return the name, then its ends after each dot: some trainers nest their settings,
    as in `actor_rollout_ref.rollout.n`."""
    parts = _plain(name).split(".")
    return ["_".join(parts[start:]) for start in range(len(parts))]


def _sharing_words(wanted: str, valid: Iterable[str]) -> list[str]:
    """Return the names that share most words with it, the most similar first."""
    words = {word for word in wanted.split("_") if len(word) >= _SHORTEST_WORD}
    shared = {plain: len(words & set(re.split("[._]", plain))) for plain in valid}
    most = max(shared.values(), default=0)
    num_words = sum(len(word) > 2 for word in wanted.split("_"))
    if not most or 2 * most < num_words:  # one word of many says little
        return []
    best = [plain for plain, count in shared.items() if count == most]
    return difflib.get_close_matches(wanted, best, n=_MOST_SHOWN, cutoff=0.0)


def _meant_by_misspelt(wanted: str, valid: Iterable[str]) -> str:
    """Return our name for the other trainers' name that `wanted` resembles. "" if a
    valid name is more similar."""
    close = difflib.get_close_matches(wanted, [*valid, *_OURS], n=1, cutoff=0.8)
    if not close:
        return ""
    return _OURS.get(close[0], "")


def _plain(name: str) -> str:
    return name.lower().removeprefix("--").replace("-", "_")
