"""Settings of training on a file of conversations, pairs or labelled replies."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from invrl.types.section import Section, Text

Kind = Literal["conversations", "pairs", "labels"]
"""Kind of a row: one conversation; a chosen and a rejected one; or one with a
verdict."""
KIND_OF_OBJECTIVE: dict[str, Kind] = {
    "sft": "conversations",
    "dpo": "pairs",
    "ipo": "pairs",
    "orpo": "pairs",
    "simpo": "pairs",
    "kto": "labels",
}
"""Built-in objectives that train on a file, and the kind of their rows."""


class DataConfig(Section):
    """Training on a file, without rollouts: conversations (sft), pairs (dpo and its
    family), labels (kto)."""

    plain_flags = ("data_path",)
    data_path: Text | None = Field(
        None,
        description="JSONL or Parquet (*.parquet) file to train on, without rollouts",
    )
    eval_path: Text | None = Field(
        None, description="file of held-out rows, for the held-out loss"
    )
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="share of data_path's rows that is held out instead; at least one row",
    )
    kind: Literal["auto", "conversations", "pairs", "labels"] = Field(
        "auto",
        description="what a row is; auto: by the objective, for one of your own by the first row's fields",
    )
    batch_size: PositiveInt = Field(
        32,
        description="rows in one training batch: conversations, pairs or labelled replies",
    )
    epochs: PositiveInt | None = Field(
        None,
        description="passes over the file after which the run ends, instead of num_steps",
    )
    shuffle: bool = Field(
        True,
        description="each pass has an order of its own, by the seed; off: the order of the file",
    )
    overlong: Literal["skip", "truncate", "refuse"] = Field(
        "skip",
        description="a row over max_sample_tokens or the model's positions: left out and counted, cut at its "
        "end, or an error",
    )
