"""What a rollout is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One item of a dataset: the task of a rollout."""

    id: str
    payload: Mapping[str, Json]
    label: Json = None
    split: str = "train"
