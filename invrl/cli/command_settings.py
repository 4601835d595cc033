"""The settings that each command uses.

`invrl serve`, `invrl eval` and `invrl engine` do not train, so most of the
configuration has no effect on them. They take only the flags of the settings that are
named here, and their checks look only at these. Every other command takes all settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from invrl.rollout.config import RolloutConfig
from invrl.run.settings.config import SECTIONS, TABLES, UPSTREAM, Source, Tables
from invrl.types.section import section_fields

_RUN = frozenset(
    {
        "run_name",
        "run_root",
        "seed",
        "heartbeat_timeout_s",
    }
)
_LOG = frozenset({"format", "level", "otel_endpoint"})
_TRAINING_SESSIONS = frozenset(
    {"train_auxiliary_roots", "lease_timeout_s", "end_grace_s"}
)
"""Settings of [session] for rewards, for leases, and for environments that still lease
when the run ends."""
_TRAINING_ROLLOUTS = frozenset(
    {
        "external_environments",
        "rollout_batch_size",
        "n_samples_per_prompt",
        "rollout_max_attempts",
        "temperature",
    }
)
"""Settings of [rollout] for making batches. `eval.modes` sets the temperatures of
held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """Settings that one command uses."""

    keys: Mapping[str, frozenset[str]]
    """Names of the settings, by the name of their table."""
    packages: tuple[str, ...] = UPSTREAM
    """Packages whose options the command takes and passes on."""
    neutral: Tables = field(default_factory=dict)
    """Values for settings that the command does not use. They contradict no value of a
    setting that it uses."""

    def uses(self, table: str, key: str) -> bool:
        return key in self.keys.get(table, ())

    def source(self) -> Source:
        """Return the neutral values as a source of the configuration. It must be the
        last source."""
        return Source(name="the command", tables=self.neutral)


def _all_keys(table: str) -> frozenset[str]:
    """Return the settings of a section or of an optional table, and "" for the
    table."""
    if table in TABLES:
        return frozenset({"", *TABLES[table].model.model_fields})
    return frozenset(section_fields(SECTIONS[table]))


_NO_TRAINER: Tables = {"run": {"debug_rollout_only": True}}
"""Values for commands without a trainer, for which weight updates do not matter."""
_EVERYTHING = CommandSettings(
    keys={table: _all_keys(table) for table in (*SECTIONS, *TABLES)}
)
_SERVE = CommandSettings(
    keys={
        "run": _RUN,
        "log": _LOG,
        "model": _all_keys("model"),
        "rollout": frozenset({"temperature", "max_new_tokens"}),
        "engine": _all_keys("engine"),
        # `serve` always applies the grammar that a client's request asks for.
        # Its sessions have no groups, by whose age the gate decides.
        "gateway": _all_keys("gateway") - {"constrained", "gate"},
        "session": _all_keys("session") - _TRAINING_SESSIONS,
    },
    packages=("sglang", "router"),
    # One rollout at a time, so short that no session limit is below its timeout.
    neutral={
        "rollout": {
            "rollout_concurrency": 1,
            "rollout_timeout_s": 1e-3,
        },
        "workers": {"count": 1},
        "eval": {"samples_per_task": 1, "engines": False},
        "gateway": {"gate": False},
        **_NO_TRAINER,
    },
)
_EVAL = CommandSettings(
    keys={
        "run": _RUN,
        "log": _LOG,
        "model": _all_keys("model") - {"adapter"},
        "rollout": frozenset(RolloutConfig.model_fields) - _TRAINING_ROLLOUTS,
        "workers": _all_keys("workers"),
        "eval": _all_keys("eval") - {"interval", "engines"},
        "engine": _all_keys("engine"),
        "placement": frozenset({"", "engines", "rollout_workers"}),
        "gateway": _all_keys("gateway"),
        "gate": _all_keys("gate"),
        "session": _all_keys("session") - _TRAINING_SESSIONS,
    },
    packages=("sglang", "router"),
    # An evaluation has no steps and no batches.
    neutral={
        "eval": {"interval": False, "engines": False},
        "buffer": {"batch_timeout_s": 1e9},
        **_NO_TRAINER,
    },
)
_ENGINE = CommandSettings(
    keys={
        "model": frozenset({"model_path"}),
        "engine": frozenset(
            {
                "dtype",
                "tp_size",
                "max_total_tokens",
                "start_timeout_s",
                "seeded_sampling",
            }
        ),
        "weights": frozenset({"inflight"}),
        "train": frozenset({"routing_replay"}),
        "log": frozenset({"otel_endpoint"}),
    },
    packages=("sglang",),
    neutral={
        **_SERVE.neutral,
        "rollout": {**_SERVE.neutral["rollout"], "max_new_tokens": 1},
    },
)
_BY_COMMAND = {"serve": _SERVE, "eval": _EVAL, "engine": _ENGINE}


def settings_for_command(command: str) -> CommandSettings:
    """Return the settings of `invrl COMMAND`."""
    return _BY_COMMAND.get(command, _EVERYTHING)
