"""Rows of a user's file, JSONL or Parquet (*.parquet): tasks or conversations.

A row is JSON in either format, and has a number that error messages name.
"""

import datetime
import decimal
import json
from pathlib import Path

import orjson

from invrl.errors import ConfigError
from invrl.types.tasks import Json
from invrl.user_code.near_path import path_fix

Rows = list[tuple[int, dict[str, Json]]]
"""Number (from 1) and fields of each non-blank line of a JSONL file, or row of a
Parquet file."""


def row_unit(file: str) -> str:
    """Return what error messages call a row's position in the file."""
    return "row" if _is_parquet(file) else "line"


def read_rows(field: str, file: str, *, of: str, each: str) -> Rows:
    """Read at least one row. Raises ConfigError for `field`. `of` and `each` name the
    rows in messages, in plural and singular."""
    if _is_parquet(file):
        fix = f"give a Parquet file, one row per {each}"
    else:
        fix = "give a JSONL file in UTF-8, one JSON object per line"
    try:
        if _is_parquet(file):
            rows = _parquet_rows(file)
        else:
            rows = _json_rows(Path(file).read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        NotImplementedError,
        ImportError,
    ) as error:  # pyarrow raises all of these
        raise ConfigError(
            field, file, f"cannot be read: {error}", path_fix(Path(file), fix)
        ) from error
    if not rows:
        raise ConfigError(field, file, f"has no {of}", fix)
    return rows


def _is_parquet(file: str) -> bool:
    return file.lower().endswith(".parquet")


def _json_rows(text: str) -> Rows:
    rows: Rows = []
    # Only "\n" ends a line of JSONL: str.splitlines would cut at U+2028 inside a
    # string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"line {number} is a JSON {type(row).__name__}, not an object"
            )
        rows.append((number, row))
    return rows


def _parquet_rows(file: str) -> Rows:
    """Return the rows as JSON values: lists and structs stay, a map becomes a list of
    pairs, times become ISO 8601, decimals become floats, NaN and infinity become
    null."""
    from pyarrow import parquet

    rows: Rows = []
    for number, row in enumerate(parquet.ParquetFile(file).read().to_pylist(), start=1):
        try:
            encoded = orjson.dumps(row, default=_json_value)
        except orjson.JSONEncodeError as error:
            raise ValueError(
                f"row {number} holds what JSON does not have: {error}"
            ) from error
        rows.append((number, orjson.loads(encoded)))
    return rows


def _json_value(value: object) -> float | str:
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(
        value, datetime.date | datetime.time
    ):  # includes pandas' types, if it is installed
        return value.isoformat()
    raise TypeError
