"""Labels of tasks in files: the rows' field that is `Task.label`, and messages about
tasks without one.

The setting `task_label_key` names the field. If it has its default and no row has that
field, the label is guessed: the first of `GUESSED_KEYS` that every row has.
"""

from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks.task_files import task_files
from invrl.store.row_file import Rows, read_rows

GUESSED_KEYS = (
    "answer",
    "solution",
    "target",
    "ground_truth",
    "expected_answer",
    "final_answer",
    "reference_answer",
)
"""Names of the label in other data sets, in lower case."""
_EMPTY = (None, "", [], {})


def label_key(rows: Rows, wanted: str) -> str:
    """Return the field that holds the labels of these rows: `wanted`, or the guessed
    one."""
    is_default = wanted == RolloutConfig.model_fields["task_label_key"].default
    if not is_default or any(wanted in row for _, row in rows):
        return wanted
    _, first_row = rows[0]
    shared = [field for field in first_row if all(field in row for _, row in rows)]
    for key in GUESSED_KEYS:
        for field in shared:
            if field.lower() == key:
                return field
    return wanted


def guess_notes(config: RolloutConfig) -> list[str]:
    """Return sentences about task files whose field of labels was guessed."""
    notes: list[str] = []
    for field, file in task_files(config):
        key = label_key(task_rows(field, file), config.task_label_key)
        if key != config.task_label_key:
            notes.append(
                f"no task of {file} has the field {config.task_label_key!r}: Task.label is its field {key!r} "
                f"(say so with --task-label-key {key}, or name another one)"
            )
    return notes


def missing_labels(config: RolloutConfig) -> str:
    """Say which task files have no label, or only empty ones. Empty if each has
    some."""
    faults: list[str] = []
    for field, file in task_files(config):
        rows = task_rows(field, file)
        key = label_key(rows, config.task_label_key)
        if not any(key in row for _, row in rows):
            _, first_row = rows[0]
            found = ", ".join(sorted(first_row))
            faults.append(
                f"no task of {file} has the field {key!r}, so every Task.label is None (it has: {found})"
            )
        elif all(row[key] in _EMPTY for _, row in rows):
            faults.append(f"the labels of {file} (field {key!r}) are all empty")
    return "; ".join(faults)


def task_rows(field: str, file: str) -> Rows:
    """Read at least one row. Raises ConfigError."""
    return read_rows(field, file, of="tasks", each="task")
