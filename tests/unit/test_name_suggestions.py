"""What a wrong name of a setting is answered with."""

from __future__ import annotations

import pytest

from invrl.cli.flags import SETTING_FLAGS, parse_flags
from invrl.errors import ConfigError
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.former_settings import FORMER_NAMES
from invrl.run.settings.name_suggestions import (
    meant_setting,
    near_settings,
    nearest_setting,
)
from invrl.run.settings.other_trainers import (
    ANSWERS,
    ON_FILES,
    ON_ROLLOUTS,
    OTHER_TRAINERS,
)

OURS = [setting.name for setting in SETTING_FLAGS]


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


FLAGS = [as_flag(name) for name in OURS]


def test_table_of_foreign_names_leads_only_to_existing_settings():
    assert set(OTHER_TRAINERS) <= set(OURS)
    foreign = [name for names in OTHER_TRAINERS.values() for name in names.split()]
    assert len(foreign) == len(set(foreign)), "a name has one meaning"
    assert not set(foreign) & set(OURS)
    assert not set(ANSWERS) & {*foreign, *OURS}
    assert {*ON_FILES, *ON_FILES.values(), *ON_ROLLOUTS, *ON_ROLLOUTS.values()} <= set(
        OURS
    )


@pytest.mark.parametrize("ours", sorted(OTHER_TRAINERS))
def test_every_foreign_setting_name_suggests_ours(ours: str):
    for foreign in OTHER_TRAINERS[ours].split():
        assert meant_setting(foreign) == ours
        *_, last = near_settings(as_flag(foreign), FLAGS)
        assert last == as_flag(ours)


def test_setting_that_the_command_lacks_is_not_suggested():
    assert near_settings("--learning-rate", ["--seed", "--gateway.port"]) == []


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("--tempratur", "--temperature"),
        ("--Learning-Rate", "--lr"),
        ("--gradient-cliping", "--clip-grad"),
        ("--rollout-batch-sise", "--rollout-batch-size"),
        ("--timeout-of-the-session", "--session.idle-timeout-s"),
        ("--dpo-beta", "--dpo.beta"),
        ("--actor-num-gpus-per-node", "--data-parallel-size"),
        ("--rollout.n", "--n-samples-per-prompt"),
        ("actor_rollout_ref.rollout.n", "--n-samples-per-prompt"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "--engine.tp-size"),
        ("trainer.total_epochs", "--num-steps"),
        ("--save", "--run-root"),
        ("critic.model.path", "--critic.model-path"),
        ("optim.weight_decay", "--weight-decay"),
        ("rollout.dppo_threshold", "--dppo.threshold"),
        ("--lora-rank", "--lora.rank"),
        ("actor_rollout_ref.model.lora_alpha", "--lora.alpha"),
    ],
)
def test_wrong_setting_name_suggests_by_spelling_and_by_words(wrong: str, near: str):
    assert near in near_settings(wrong, FLAGS)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("--epochs", "--data.epochs"),
        ("--batch-size", "--data.batch-size"),
        ("--dataset", "--data-path"),
        ("--beta", "--dpo.beta"),
        ("--max-length", "--max-sample-tokens"),
        ("--learning-rate", "--lr"),
    ],
)
def test_a_run_on_a_file_gets_the_settings_of_files(wrong: str, near: str) -> None:
    assert near_settings(wrong, FLAGS, on_file=True) == [near]


def test_epochs_of_a_run_on_rollouts_are_steps_unless_a_file_was_meant() -> None:
    assert near_settings("--epochs", FLAGS) == ["--num-steps", "--data.epochs"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("--resume-from-checkpoint", "invrl resume RUN"),
        ("--logging-steps", "every step is logged"),
        ("--input-key", "task.payload"),
        ("--load", "--model-path"),
        ("--use-lora", "--lora.rank"),
        ("--load-in-4bit", "not quantized"),
        (
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            "--sglang-mem-fraction-static",
        ),
        ("--num-attention-heads", "config.json"),
        ("--enforce-eager", "--sglang-cuda-graph-backend-decode disabled"),
        ("--recompute-granularity", "--megatron-recompute-granularity"),
        ("megatron_cfg.overlap_grad_reduce", "--megatron-overlap-grad-reduce"),
        ("--expert-tensor-parallel-size", "--expert-model-parallel-size"),
    ],
)
def test_what_has_no_setting_here_is_answered_with_what_to_do(
    name: str, answer: str
) -> None:
    assert answer in nearest_setting(name, FLAGS)


def test_one_word_of_many_is_no_likeness() -> None:
    assert near_settings("--steps-of-my-own-new-thing", FLAGS) == []


@pytest.mark.parametrize(("old", "new"), FORMER_NAMES.items())
def test_a_renamed_setting_is_refused_with_its_new_name(old: str, new: str) -> None:
    names = [setting.name for setting in SETTING_FLAGS]
    assert old not in names
    fix = nearest_setting(old, names)
    flags = ["--" + name.replace("_", "-") for name in names]
    fix_of_flag = nearest_setting("--" + old.replace("_", "-"), flags)
    if new.startswith("plugin."):
        _, plugin, *keys = new.split(".")
        assert f":{plugin}" in fix, "what loads it"
        assert all(key in fix and f"[plugin.{plugin}]" in fix for key in keys)
        assert f":{plugin}" in fix_of_flag
        assert all(fix_of_flag.endswith(key.replace("_", "-")) for key in keys)
    else:
        assert fix == f"it was renamed: write {new}"
        assert fix_of_flag.endswith("--" + new.replace("_", "-"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("critic_lr", "critic.lr"),
        ("engine_tp_size", "engine.tp_size"),
        ("keep_best", "checkpoints.keep_best"),
        ("gae_lambda", "critic.gae_lambda"),
    ],
)
def test_a_setting_that_moved_into_a_table_is_found_there(old: str, new: str) -> None:
    names = [setting.name for setting in SETTING_FLAGS]
    assert nearest_setting(old, names) == f"did you mean {new}?"
    table, _, key = new.partition(".")
    with pytest.raises(ConfigError) as refused:
        resolve(Source(name="a file", tables={"train": {old: 1}}))
    place = "move it to" if key == old else f"write {key}, in"
    assert refused.value.fix == f"{place} table [{table}]"


BARE_NAMES = (
    "gae_lambda vtrace_rho_cap vtrace_c_cap value_clip keep_best keep_best_by progress"
    " otel_endpoint tensorboard mlflow_tracking_uri sample_interval_s extra_columns"
    " train_auxiliary_roots end_grace_s lease_timeout_s generate_timeout_s constrained"
    " match_level smg_environment seeded_sampling special_tokens_in_content"
).split()
"""Keys of tables that were flags without the table's name."""
MOVED = {
    name.rpartition(".")[2]: name
    for name in OURS
    if name.rpartition(".")[2] in BARE_NAMES
}
MOVED |= {
    name.replace(".", "_"): name
    for name in OURS
    if "." in name and name.replace(".", "_") not in OURS
}


@pytest.mark.parametrize("old", [*BARE_NAMES, *sorted(MOVED.keys() - set(BARE_NAMES))])
def test_every_flag_that_got_its_table_is_refused_with_it(old: str) -> None:
    if old in FORMER_NAMES:
        pytest.skip("it has another new name")
    with pytest.raises(ConfigError) as refused:
        parse_flags([as_flag(old), "3"])
    assert refused.value.fix == f"did you mean {as_flag(MOVED[old])}?"
