"""What a rollout is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One item of a dataset: what a rollout is asked to do."""

    id: str
    payload: Mapping[str, Json]
    label: Json = None
    split: str = "train"
