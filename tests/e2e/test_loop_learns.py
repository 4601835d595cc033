"""The whole real stack on a tiny random model: `invrl train` as a user starts it. It
learns what is rewarded, and does not where the reward is shuffled or the advantage's
sign is flipped.

Each run is a process of its own: SGLang, router, gateway, Ray, Megatron, all real.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from e2e.runs import DEADLINE_S, STEPS, steps_of, train


def change(run: Path) -> float:
    """Mean reward of the last four steps less that of the first four."""
    rewards = [row["rollout/reward_mean"] for row in steps_of(run)]
    assert len(rewards) >= 16
    return sum(rewards[-4:]) / 4 - sum(rewards[:4]) / 4


@pytest.mark.timeout(DEADLINE_S)
def test_reward_rises_in_training(learned: Path) -> None:
    assert change(learned) > 0.2


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_reward_falls_with_flipped_advantages(folder: Path) -> None:
    """Two data-parallel ranks."""
    control = ("--advantage", "tests.e2e.trivial:flipped", "--data-parallel-size", "2")
    assert change(train(folder, "flipped", *control)) < -0.2


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_reward_does_not_rise_with_shuffled_rewards(folder: Path) -> None:
    """Such a policy walks at random: the changes of four runs were -0.06 to 0.05. What
    rises by luck does not rise a second time from another seed; what rises by a fault
    does."""
    control = ("--num-steps", "16", "--advantage", "tests.e2e.trivial:shuffled")
    runs = (
        train(folder, f"shuffled-{seed}", "--seed", str(seed), *control)
        for seed in (0, 1)
    )
    assert any(change(run) < 0.1 for run in runs)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_off_policy_run_clips_and_learns(folder: Path) -> None:
    """Staleness 1 as a strict bound, two optimizer steps per batch, two pipeline
    stages, two engines: ratios move, some are clipped, and both stages learn. Two
    held-out sets before, midway and after."""
    run = train(
        folder,
        "async",
        *(
            "--max-staleness",
            "1",
            "--when-stale",
            "wait",
            "--num-mini-batches",
            "2",
            "--pipeline-model-parallel-size",
            "2",
        ),
        *("--num-engines", "2", "--eps-clip-low", "0.02", "--eps-clip-high", "0.02"),
        *(
            "--eval.sets",
            "a=tests.e2e.trivial:tasks,b=tests.e2e.trivial:tasks",
            "--eval.tasks",
            "4",
        ),
        *(
            "--eval.interval",
            str(STEPS // 2),
            "--eval.samples-per-task",
            "2",
            "--eval.modes",
            "sampled",
        ),
    )
    rows = steps_of(run)
    every = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    for held_out in ("a", "b"):  # beside running rollouts, too
        name = f"eval/{held_out}/sampled/samples"
        assert {row["step"]: row[name] for row in every if name in row} == {
            0: 8,
            STEPS // 2: 8,
            STEPS: 8,
        }
    assert max(row["train/clip_fraction"] for row in rows) > 0
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert change(run) > 0.1
    assert max(row["sync/canary_max_gap"] for row in rows) <= 1e-3
    untrained = load_file(folder / "model" / "model.safetensors")
    [exported] = (run / "checkpoints").glob("*/hugging_face/model.safetensors")
    trained = load_file(exported)
    assert trained.keys() == untrained.keys()
    assert not [
        name for name, tensor in trained.items() if tensor.equal(untrained[name])
    ]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_a_loss_over_the_likeliest_tokens_learns(folder: Path) -> None:
    """The engine's candidates of each token go through gateway, store and batch to the
    trainer. The change of one such run was 0.45."""
    run = train(
        folder,
        "likeliest",
        *(
            "--num-steps",
            "16",
            "--algorithm-preset",
            "dppo",
            "--policy-loss",
            "invrl.contrib.dppo_topk:DPPOTotalVariation",
        ),
        *(
            "--rollout-top-logprobs",
            "20",
            "--num-mini-batches",
            "2",
            "--max-staleness",
            "1",
        ),
    )
    assert change(run) > 0.1


@pytest.mark.timeout(DEADLINE_S)
def test_engine_and_trainer_agree_on_every_token(learned: Path) -> None:
    """fp32 on both sides: sampled log-probs against the trainer's, on every trained
    token of the run."""
    rows = steps_of(learned)
    assert max(row["train/logprob_gap_max"] for row in rows) <= 1e-3
    assert all(row["sync/canary_max_gap"] <= 1e-3 for row in rows)


@pytest.mark.timeout(DEADLINE_S)
def test_second_turn_reuses_the_radix_cache(learned: Path) -> None:
    """Prompts of second turns, by tokens: what the engine had in its cache."""
    assert min(row["rollout/later_cached_fraction"] for row in steps_of(learned)) >= 0.7


@pytest.mark.timeout(DEADLINE_S)
def test_a_run_leaves_what_a_viewer_needs(learned: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert any((learned / "tensorboard").iterdir())
    exported = next((learned / "checkpoints").glob("*/hugging_face"))
    assert AutoModelForCausalLM.from_pretrained(exported).config.num_hidden_layers == 2
    assert any(next((learned / "checkpoints").glob("*/megatron")).iterdir())


@pytest.mark.timeout(DEADLINE_S)
def test_a_run_leaves_nothing_in_the_temporary_folder(
    learned: Path, temporary: Path
) -> None:
    """But torch's folder for compiled kernels, which the next run uses."""
    assert learned.exists()
    assert [
        path.name
        for path in temporary.iterdir()
        if not path.name.startswith("torchinductor_")
    ] == []


@pytest.mark.timeout(DEADLINE_S)
def test_log_lines_of_user_code_name_run_and_session_and_hold_no_key(
    learned: Path,
) -> None:
    lines = (learned / "logs" / "rollout-worker-0.log").read_text().splitlines()
    begins = [line for line in lines if " begins at http" in line]
    assert len(begins) >= STEPS * 32
    sessions = {
        re.search(
            r" I rollout-worker-0 run=learned session=(ses-\S+) \S+trivial: ", line
        )
        for line in begins
    }
    assert None not in sessions
    assert len({found[1] for found in sessions if found}) == len(begins)
    assert all(line.endswith("with the key (session key)") for line in begins)
    first_lines = {
        path: path.read_text()[:500]
        for path in (learned / "logs").glob("ray/*/worker-*")
    }
    processes = [
        re.search(r"^:process:(\S+) of run learned$", text, re.M)
        for text in first_lines.values()
    ]
    assert {found[1] for found in processes if found} == {
        "trainer-rank-0",
        "buffer",
        "rollout-worker-0",
    }
    assert None not in processes
    for path in (learned / "logs").rglob("*"):
        assert not path.is_file() or b"isk-" not in path.read_bytes(), path


@pytest.mark.timeout(DEADLINE_S)
def test_run_leaves_no_process(learned: Path) -> None:
    left = [
        p.info
        for p in psutil.process_iter(["pid", "cmdline"])
        if str(learned) in str(p.info["cmdline"])
    ]
    assert not left
