"""All settings: one tree of frozen sections, each declared next to its owner, composed
here.

Values come from these sources, the later ones winning: defaults, the algorithm preset,
a TOML file, flags (`resolve`). Invariant: before anything starts, `resolve` returns a
complete and consistent configuration, or raises a ConfigError that says what to change.
Imports without torch, ray, sglang or transformers.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import tomli_w
from pydantic import Field, StrictBool, StrictFloat, StrictInt, ValidationError
from pydantic.fields import FieldInfo

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.presets import PRESETS
from invrl.buffer.config import BufferConfig
from invrl.datasets.config import DataConfig
from invrl.engines.config import EngineConfig
from invrl.errors import ConfigError
from invrl.gateway.config import GatewayConfig
from invrl.rollout.config import RolloutConfig
from invrl.run.checkpoints.checkpoint_scores import ScoreKind
from invrl.run.settings.contradictions import check
from invrl.run.settings.former_settings import former_fix
from invrl.run.settings.name_suggestions import (
    answer_without_setting,
    meant_setting,
    nearest,
    nearest_setting,
)
from invrl.run.settings.run_config import ModelConfig, RunConfig, model_folder
from invrl.run.settings.value_suggestions import value_fix
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.section import (
    Choice,
    Section,
    merged,
    section_fields,
    section_tables,
)
from invrl.weights.config import Weights, WeightsConfig

Scalar = StrictBool | StrictInt | StrictFloat | str
"""Type of a pass-through option or a flag."""
UpstreamOptions = dict[str, Scalar]


class Config(Section):
    """All settings of a run, made by `resolve()`. The options in `sglang`, `router` and
    `megatron` pass through to those packages by name."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    engine: EngineConfig
    gateway: GatewayConfig
    buffer: BufferConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    weights: Weights
    sglang: UpstreamOptions = Field(default_factory=dict)
    router: UpstreamOptions = Field(default_factory=dict)
    megatron: UpstreamOptions = Field(default_factory=dict)

    @property
    def trains_on_data(self) -> bool:
        """Whether the run trains on a file, without rollouts."""
        return bool(self.data.data_path)

    @property
    def trains_alone(self) -> bool:
        """Whether the run starts only the trainer: no engine, no gateway and no
        rollouts."""
        return self.run.debug_train_only or self.trains_on_data

    @property
    def uses_priority_scheduling(self) -> bool:
        """Whether engines sample requests of older groups first: with a gate, unless an
        option of SGLang excludes it."""
        options = {name.replace("-", "_"): value for name, value in self.sglang.items()}
        return (
            self.gateway.gate is not None
            # SGLang knows priorities only with these.
            and options.get("schedule_policy", "fcfs") in ("fcfs", "lof")
            and not _is_on(options, "schedule_low_priority_values_first")
            # Its metrics would get a label for each priority, which no group shares.
            and not _is_on(options, "enable_metrics")
        )

    @property
    def critic_folder(self) -> Path:
        """Absolute folder of the critic's initial model; meaningless without a
        `model_path`."""
        critic = self.algorithm.critic
        if critic is None or critic.model_path is None:
            return self.model.folder
        return model_folder(critic.model_path)

    @property
    def teacher_folder(self) -> Path | None:
        """Absolute folder of a teacher that the trainer computes."""
        teacher = self.algorithm.teacher
        if teacher is None or teacher.model_path is None:
            return None
        return model_folder(teacher.model_path)

    @property
    def critic_layout(self) -> ParallelLayout | None:
        """Layout of the critic's own ranks; None if it has none."""
        return self.train.critic_layout(self.algorithm.critic)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the policy, and of a critic that has its own."""
        return self.train.num_ranks(self.algorithm.critic)

    @property
    def engine_nodes(self) -> str | None:
        """Label, name or address of the nodes that engines are placed on; None: they
        start on the driver's node."""
        return None if self.run.placement is None else self.run.placement.engines

    @property
    def rank_nodes(self) -> str | None:
        """The same for the trainer's ranks."""
        return None if self.run.placement is None else self.run.placement.trainer

    @property
    def worker_nodes(self) -> str | None:
        """The same for the rollout workers."""
        placement = self.run.placement
        return None if placement is None else placement.rollout_workers

    @property
    def engines_here(self) -> int:
        """Number of engines that start on the driver's node."""
        if self.trains_alone or self.engine_nodes:
            return 0
        return self.engine.num_engines

    @property
    def best_checkpoints_by(self) -> ScoreKind:
        """Metric that `checkpoints.keep_best_by` stands for in this run."""
        if self.trains_on_data:
            return "held_out_loss"
        if self.run.checkpoints.keep_best_by != "auto":
            return self.run.checkpoints.keep_best_by
        return "held_out" if self.rollout.eval.interval else "reward"

    def settings(self) -> dict[str, dict[str, object]]:
        """Every present setting by table and key, in the form that a TOML file has. A
        table of a section is on the level of the sections; `false` is what turns off a
        setting or a table that a default would turn on."""
        tables: dict[str, dict[str, object]] = self.model_dump(mode="json")
        for name, section in SECTIONS.items():
            tables[name] = _without_absent(section_fields(section), tables[name])
        for name in PRESETS.get(self.algorithm.algorithm_preset or "", {}):
            tables["algorithm"].setdefault(name, False)
        for name, table in TABLES.items():
            entries = tables[table.section].get(name)
            if isinstance(entries, dict):
                del tables[table.section][name]
                tables[name] = _without_absent(table.model.model_fields, entries)
        return tables

    def to_toml(self) -> str:
        """Return the whole tree as TOML; `resolve` reads it back to an equal one."""
        return tomli_w.dumps(self.settings())


def _is_on(options: UpstreamOptions, switch: str) -> bool:
    """Whether a switch of an upstream package is given and not turned off."""
    return str(options.get(switch, False)).lower() not in ("false", "0", "no")


def _without_absent(
    fields: Mapping[str, FieldInfo], entries: Mapping[str, object]
) -> dict[str, object]:
    present: dict[str, object] = {}
    for key, value in entries.items():
        if value is not None:
            present[key] = value
        elif fields[key].default is not None:
            present[key] = False
    return present


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
} | {"weights": WeightsConfig}
UPSTREAM = tuple(name for name in Config.model_fields if name not in SECTIONS)


class Table(NamedTuple):
    """A table of a section. In a file it is on the level of the sections."""

    section: str
    """Section that has it as a field."""
    model: type[Section]


TABLES: dict[str, Table] = {
    name: Table(section=section_name, model=model)
    for section_name, section in SECTIONS.items()
    for name, model in section_tables(section).items()
}
CHOICES: dict[str, Choice] = {
    name: choice
    for section in SECTIONS.values()
    for name, choice in section.chosen_by.items()
}
"""The choice that turns an optional table on, by the name of the table."""
Tables = Mapping[str, Mapping[str, Scalar | Mapping[str, Scalar]]]


def table_model(table: str) -> type[Section] | None:
    """The model of a section or of a table; None for any other name."""
    if table in TABLES:
        return TABLES[table].model
    return SECTIONS.get(table)


def setting_name(table: str, key: str) -> str:
    """The name of a setting as flags have it: with its table, or without."""
    section = SECTIONS.get(table)
    if section is None:
        return f"{table}.{key}"
    plain = section.plain_flags
    return key if plain is None or key in plain else f"{table}.{key}"


def default_settings(table: str) -> dict[str, object]:
    """Return the settings of a table without an entry."""
    model = table_model(table)
    fields = section_fields(model) if model is not None else {}
    return {
        key: field.default for key, field in fields.items() if not field.is_required()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Values from one place, by table and key. Errors call that place `name`."""

    name: str
    tables: Tables


def read_toml(path: Path) -> Source:
    """Read a configuration file as a source. Raises ConfigError if it is not TOML;
    `resolve` checks its names."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            "--config", str(path), str(error), "give a readable TOML file"
        ) from error
    for table, entries in document.items():
        if not isinstance(entries, dict):
            raise ConfigError(
                f"{table} in {path}", entries, "a table is expected", _table_fix(table)
            )
    return Source(name=str(path), tables=document)


def _table_fix(key: str) -> str:
    """Return the fix for a key outside of all tables."""
    former = former_fix(key)
    if former:
        return former
    place = _place_fix(key)
    if place:
        return place
    setting = meant_setting(key)
    answer = answer_without_setting(key)
    if answer:
        return answer
    if setting:
        table, key = _setting_place(setting)
        return f"write it as {key}, in table [{table}]"
    return f"write [{key}] and its keys below"


def resolve(*sources: Source) -> Config:
    """Resolve the sources over the algorithm's preset over the defaults; later sources
    win. Raises ConfigError for values that are invalid or contradict each other."""
    values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for source in sources:
        for table, entries in source.tables.items():
            if table not in TABLES:
                values.setdefault(table, {}).update(entries)
        for table, entries in source.tables.items():
            if table in TABLES:
                section = values[TABLES[table].section]
                section[table] = merged(section.get(table), entries)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        _refuse(error, sources)
    check(config)
    return config


def _refuse(error: ValidationError, sources: Sequence[Source]) -> NoReturn:
    """Raise the first of pydantic's findings as a ConfigError."""
    finding = error.errors()[0]
    location = [str(part) for part in finding["loc"]]
    of_table = TABLES.get(location[1]) if len(location) > 2 else None
    if of_table is not None and of_table.section == location[0]:
        location = location[1:]
    value = finding["input"]
    kind = ""
    if location[0] in SECTIONS and SECTIONS[location[0]].kinds:
        if len(location) > 2:
            kind = location.pop(1)
        elif finding["type"] == "union_tag_invalid":
            location.append("transport")
            value = finding.get("ctx", {}).get("tag")
    table = location[0]
    key = location[1] if len(location) > 1 else ""
    known = Config.model_fields
    model = table_model(table)
    if model is not None:
        known = section_fields(model)

    reason = finding["msg"]
    fix = "give a string, a number or a boolean"
    if finding["type"] == "extra_forbidden" and key:
        reason = "no such key"
        if kind and key in known:
            reason = f"the transport {kind!r} has no such setting"
        fix = _key_fix(key, table)
    elif finding["type"] == "extra_forbidden":
        reason = "no such table"
        fix = former_fix(table) or nearest(table, [*SECTIONS, *TABLES, *UPSTREAM])
    elif key in known:
        fix = value_fix(setting_name(table, key), value, known[key])
        if finding["type"] == "union_tag_invalid":
            reason = "no such transport"
        if finding["type"] == "missing":
            fix = f"give {table}.{key} too: {known[key].description}"
    reason += f" (from {_setting_origin(table, key, sources)})"
    if error.error_count() > 1:
        reason += f" ({error.error_count() - 1} more)"
    field = f"{table}.{key}" if key else table
    raise ConfigError(field, value, reason, fix) from error


def _setting_origin(table: str, key: str, sources: Sequence[Source]) -> str:
    """Return the name of the last source that sets the key; any key of the table if
    `key` is empty."""
    origin = "default"
    for source in sources:
        if table in source.tables and (not key or key in source.tables[table]):
            origin = source.name
    return origin


def _key_fix(key: str, table: str) -> str:
    """Return the fix for a key that its table does not have."""
    former = former_fix(key) or former_fix(f"{table}.{key}")
    if former:
        return former
    model = table_model(table)
    if model is not None and model.kinds:
        kinds = [name for name, kind in model.kinds.items() if key in kind.model_fields]
        if kinds:
            return f"add --{table}.transport {' or '.join(kinds)}, or leave it out"
    place = _place_fix(key)
    if place:
        return place
    meant_table, meant_key = _setting_place(meant_setting(key))
    if meant_table not in ("", table):
        return f"did you mean {meant_key}, in table [{meant_table}]?"
    return nearest_setting(key, section_fields(model) if model else ())


def _place_fix(key: str) -> str:
    """Return the fix for a key of another table, or with its table's name before it; ""
    for any other key."""
    table, right_key = _setting_place(key)
    if not table:
        return ""
    if right_key != key:
        return f"write {right_key}, in table [{table}]"
    return f"move it to table [{table}]"


def _setting_place(name: str) -> tuple[str, str]:
    """Return the table and the key of a setting by the name that flags have, by that
    name with an underscore for its dot, or by its key alone if one table has it. ""
    if there is no such setting."""
    if "." in name:
        table, _, key = name.partition(".")
        return table, key
    for table, section in SECTIONS.items():
        if name in section.model_fields and setting_name(table, name) == name:
            return table, name
    if meant_setting(name):
        return "", name  # what another trainer means by it comes first
    places: list[tuple[str, str]] = []
    for table in (*SECTIONS, *TABLES):
        for key in section_fields(table_model(table) or Section):
            if name in (key, f"{table}_{key}"):
                places.append((table, key))
    return places[0] if len(places) == 1 else ("", name)
