"""The data of a run without rollouts: its files, read and split, and the batch of each
step.

Rows are read and checked before a process starts; they are tokenized at their step, or
all together if they are held out. Before the start, a thousand rows spread over the
file are also tokenized, so that a template that refuses such conversations is found. A
row that turns out to be unusable later is left out and counted: it may be one of a
million.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from invrl.datasets.config import KIND_OF_OBJECTIVE, DataConfig, Kind
from invrl.datasets.order import RowOrder, split_off
from invrl.datasets.rows import DataRow, data_file_kind, load_rows, unusable_row
from invrl.datasets.samples import RowTokenizer, make_step_batch
from invrl.errors import ConfigError, UnusableRowError
from invrl.gateway.rendering.renderer import Renderer
from invrl.types.batches import TrainBatch, TrainSample

_DATA_PATH = "data.data_path"
_EVAL_PATH = "data.eval_path"
_ROWS_TOKENISED_AT_START = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The batch of a step, and the rows that were left out of it."""

    batch: TrainBatch
    rows: int
    skipped: int
    """Rows that are too long."""
    unusable: tuple[str, ...]
    """Errors of rows that cannot be trained, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Rows of a run's files, at least one to train on."""

    file: str
    rows: tuple[DataRow, ...]
    held_out_file: str
    held_out: tuple[DataRow, ...]
    """Empty if nothing is held out."""
    tokenizer: RowTokenizer
    order: RowOrder

    def step(self, step: int) -> StepData:
        """Return the data of a step, from 1. Raises ConfigError for a row that cannot
        be trained where `overlong` is "refuse"."""
        samples: list[TrainSample] = []
        skipped = 0
        unusable: list[str] = []
        draws = self.order.batch(step)
        for draw in draws:
            row = self.rows[draw.index]
            try:
                of_row = self.tokenizer.samples(row, draw.epoch)
            except UnusableRowError as error:
                fault = unusable_row(_DATA_PATH, self.file, row.number, error)
                if self.tokenizer.overlong == "refuse":
                    raise fault from error
                unusable.append(str(fault))
                continue
            samples += of_row
            skipped += not of_row
        if self._is_only_label(samples):
            samples = []
            skipped += 1
        return StepData(
            batch=make_step_batch(samples, step=step),
            rows=len(draws),
            skipped=skipped,
            unusable=tuple(unusable),
        )

    def held_out_batch(self) -> TrainBatch | None:
        """Return all held-out rows; None if nothing is held out. Raises ConfigError for
        an unusable row, or if all are too long."""
        if not self.held_out:
            return None
        samples = list(self._all_samples(_EVAL_PATH, self.held_out_file, self.held_out))
        if not samples:
            reason = f"all {len(self.held_out)} held-out rows are longer than {self.tokenizer.max_tokens} tokens"
            fix = "raise --max-sample-tokens, hold out shorter rows, or set --data.overlong truncate"
            raise ConfigError(_EVAL_PATH, self.held_out_file, reason, fix)
        if self._is_only_label(samples):
            reason = "one labelled row is held out, and its loss needs another one to compare with"
            raise ConfigError(
                _EVAL_PATH, self.held_out_file, reason, "hold out two rows or more"
            )
        return make_step_batch(samples, step=0)

    def _is_only_label(self, samples: list[TrainSample]) -> bool:
        """Whether this is the only labelled row of a batch: kto compares each row with
        another one (`algorithms/objectives/mismatched_samples.py`)."""
        return self.tokenizer.kind == "labels" and len(samples) == 1

    def check_tokens(self) -> str:
        """Tokenize the held-out rows and a part of the others, and report the result.
        Raises ConfigError."""
        held_out = self.held_out_batch()
        stride = -(-len(self.rows) // _ROWS_TOKENISED_AT_START)
        rows = self.rows[::stride]
        samples = list(self._all_samples(_DATA_PATH, self.file, rows))
        if not samples:
            reason = f"none of {len(rows)} rows has {self.tokenizer.max_tokens} tokens or fewer"
            fix = "raise --max-sample-tokens, shorten the rows, or set --data.overlong truncate"
            raise ConfigError(_DATA_PATH, self.file, reason, fix)
        longest = max(len(sample.tokens_T) for sample in samples)
        text = f"{len(self.rows):,} rows ({self.tokenizer.kind}), rows of up to {longest:,} tokens"
        if held_out is not None:
            text += f"; {len(self.held_out):,} held out"
        return text

    def shared_rows(self) -> int:
        """Count the held-out rows that equal a training row."""
        trained = {repr(row.sides) for row in self.rows}
        return sum(repr(row.sides) in trained for row in self.held_out)

    def _all_samples(
        self, field_name: str, file: str, rows: tuple[DataRow, ...]
    ) -> Iterator[TrainSample]:
        for row in rows:
            try:
                yield from self.tokenizer.samples(row)
            except UnusableRowError as error:
                raise unusable_row(field_name, file, row.number, error) from error


def resolve_data_kind(config: DataConfig, objective: str) -> Kind:
    """Return the kind of the data's rows. Raises ConfigError if the first row is needed
    and cannot be read."""
    if config.kind != "auto":
        return config.kind
    if objective in KIND_OF_OBJECTIVE:
        return KIND_OF_OBJECTIVE[objective]
    return data_file_kind(_DATA_PATH, str(_absolute(config.data_path or "")))


def load_dataset(
    config: DataConfig,
    objective: str,
    renderer: Renderer,
    *,
    max_tokens: int,
    seed: int,
) -> Dataset:
    """Read all files. `max_tokens`: the most of a row. Raises ConfigError for any error
    in them."""
    kind = resolve_data_kind(config, objective)
    file = str(_absolute(config.data_path or ""))
    rows = load_rows(_DATA_PATH, file, kind)
    held_out: list[DataRow] = []
    held_out_file = file
    if config.eval_path:
        held_out_file = str(_absolute(config.eval_path))
        held_out = load_rows(_EVAL_PATH, held_out_file, kind)
    elif config.eval_fraction:
        if len(rows) == 1:
            reason = f"{file} has one row, and nothing would be left to train on"
            fix = "leave it out, or give --data.eval-path"
            raise ConfigError("data.eval_fraction", config.eval_fraction, reason, fix)
        kept, held = split_off(len(rows), config.eval_fraction, seed)
        held_out = [rows[index] for index in held]
        rows = [rows[index] for index in kept]
    return Dataset(
        file=file,
        rows=tuple(rows),
        held_out_file=held_out_file,
        held_out=tuple(held_out),
        tokenizer=RowTokenizer(
            renderer=renderer,
            kind=kind,
            max_tokens=max_tokens,
            overlong=config.overlong,
        ),
        order=RowOrder(
            num_rows=len(rows),
            batch_size=config.batch_size,
            epochs=config.epochs or 0,
            shuffle=config.shuffle,
            seed=seed,
        ),
    )


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
