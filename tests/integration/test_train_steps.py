"""Steps of real ranks over gloo: however a batch is split, resumed or refused, the
weights are right."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rank_pool import Arrays, RankPool, Trainer
from slow_cases import first_quick
from tiny_model import make_tiny_model
from train_reference import check_same_bits, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import DiskFullError, TrainError
from invrl.store.manifest import read_entries, write_manifest
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
ALGORITHM = AlgorithmConfig(kl={"coefficient": 0.05})
BATCHES = (
    random_batch(0),
    random_batch(1, groups=1, rollouts=1),  # little more than one rollout's tree
    random_batch(2, groups=5),
)


def settings(*, sharded: bool = True, **fields: object) -> TrainConfig:
    given: dict[str, object] = {
        "train_dtype": "float32",
        "lr": 1e-3,
        "max_tokens_per_micro_batch": 40,
        "use_distributed_optimizer": sharded,
    }
    return TrainConfig.model_validate(given | fields)


def one_rollout(batch: TrainBatch) -> TrainBatch:
    """A batch that has nothing for a second rank."""
    sample = batch.samples[0]
    advantages_T = batch.advantages[0]
    return TrainBatch(
        batch_id=batch.batch_id,
        version=batch.version,
        samples=(sample,),
        advantages=(advantages_T,),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def train_all(trainer: Trainer) -> list[dict[str, float]]:
    """Two mini-batches of each batch, and a batch that leaves a rank without data."""
    numbers = [resolve(trainer.train(batch, steps=2)) for batch in BATCHES]
    return [*numbers, resolve(trainer.train(one_rollout(BATCHES[0])))]


@pytest.fixture(scope="module")
def alone(pool: RankPool, model: Path) -> tuple[list[dict[str, float]], Arrays]:
    trainer = pool.build(model, train=settings(sharded=False), algorithm=ALGORITHM)
    return train_all(trainer), trainer.weights()


@pytest.mark.parametrize(
    "sharded",
    first_quick([True, False]),
    ids=["distributed_optimizer", "plain_optimizer"],
)
def test_two_ranks_take_the_steps_of_one(
    pool: RankPool,
    model: Path,
    alone: tuple[list[dict[str, float]], Arrays],
    sharded: bool,
) -> None:
    pair = pool.build(
        model, ranks=2, train=settings(sharded=sharded), algorithm=ALGORITHM
    )
    numbers = train_all(pair)
    first, second = pair.each("weights")
    expected_numbers, expected = alone
    check_same_bits(first, second)
    gap, name = worst(first, expected)
    assert gap < BOUND, name
    for measured, single in zip(numbers, expected_numbers, strict=True):
        for key in (
            "loss",
            "grad_norm",
            "ratio_max",
            "clip_fraction",
            "entropy",
            "kl_reference",
            "tokens",
        ):
            assert measured[key] == pytest.approx(single[key], rel=1e-4, abs=1e-6), key


def test_distributed_optimizer_takes_the_same_steps(
    pool: RankPool, model: Path, alone: tuple[list[dict[str, float]], Arrays]
) -> None:
    trainer = pool.build(model, train=settings(sharded=True), algorithm=ALGORITHM)
    train_all(trainer)
    gap, name = worst(trainer.weights(), alone[1])
    assert gap < 1e-6, name


@pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float32"]))
@pytest.mark.parametrize(
    "sharded",
    first_quick([True, False]),
    ids=["distributed_optimizer", "plain_optimizer"],
)
def test_checkpoint_resumes_exactly(
    pool: RankPool, model: Path, tmp_path: Path, sharded: bool, dtype: str
) -> None:
    """Adam's moments and step counts, master weights that bf16 cannot hold, and the
    schedule are in it."""
    train = settings(
        sharded=sharded, train_dtype=dtype, lr_decay_style="linear", lr_decay_steps=6
    )
    trainer = pool.build(model, train=train)
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    numbers = resolve(trainer.train(BATCHES[2], steps=2))
    expected = trainer.weights()
    resumed = pool.build(model, train=train)
    for _ in range(2):  # then into a trainer that has trained on
        resumed.each("load", str(tmp_path / "saved"))
        repeated = resolve(resumed.train(BATCHES[2], steps=2))
        weights = resumed.weights()
        check_same_bits(weights, expected)
        assert repeated["lr"] == numbers["lr"]


@pytest.mark.parametrize("style", first_quick(["cosine", "linear", "constant"]))
def test_the_learning_rate_follows_its_schedule(
    pool: RankPool, model: Path, style: str
) -> None:
    """Linear warm-up over 2 steps, the first of them above 0; then from lr to lr_min at
    step 6, and no further (cosine: SGDR, arXiv 1608.03983, equation 5)."""
    train = settings(
        lr=1e-3,
        lr_min=1e-4,
        lr_warmup_steps=2,
        lr_decay_style=style,
        lr_decay_steps=6 if style != "constant" else None,
    )
    trainer = pool.build(model, train=train)
    rates = [resolve(trainer.train(BATCHES[2]))["lr"] for _ in range(8)]
    done = [min(1.0, max(0.0, (step - 2) / 4)) for step in range(8)]
    decay = {
        "constant": lambda x: 1e-3,
        "linear": lambda x: 1e-3 - 9e-4 * x,
        "cosine": lambda x: 1e-4 + 9e-4 * 0.5 * (1 + np.cos(np.pi * x)),
    }[style]
    expected = [
        1e-3 * (step + 1) / 3 if step < 2 else decay(done[step]) for step in range(8)
    ]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_the_first_step_of_a_warm_up_moves_the_weights(
    pool: RankPool, model: Path
) -> None:
    trainer = pool.build(model, train=settings(lr_warmup_steps=4))
    start = trainer.weights()
    assert resolve(trainer.train(BATCHES[0]))["lr"] == pytest.approx(1e-3 / 5)
    assert all(
        (weight != start[name]).any() for name, weight in trainer.weights().items()
    )


def without_signal(batch: TrainBatch, *, groups: frozenset[str]) -> TrainBatch:
    """These groups' advantages are 0."""
    pairs = zip(batch.samples, batch.advantages, strict=True)
    advantages = tuple(
        a_T * 0 if sample.group_id in groups else a_T for sample, a_T in pairs
    )
    return replace(batch, advantages=advantages)


def groups_of(batch: TrainBatch) -> list[str]:
    return list(dict.fromkeys(sample.group_id for sample in batch.samples))


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_batch_without_signal_changes_no_state(
    pool: RankPool, model: Path, ranks: int
) -> None:
    """Adam's momentum and weight decay would move the weights under a gradient of 0,
    and the schedule would go on."""
    train = settings(weight_decay=0.1, lr_decay_style="linear", lr_decay_steps=8)
    trainer = pool.build(model, ranks=ranks, train=train)
    trainer.train(BATCHES[0])
    start = trainer.weights()
    silent = without_signal(BATCHES[2], groups=frozenset(groups_of(BATCHES[2])))
    numbers = resolve(trainer.train(silent, steps=2))
    assert numbers["optimizer_steps"] == 0
    assert numbers["skipped_steps"] == 2
    assert numbers["grad_norm"] == 0
    check_same_bits(trainer.weights(), start)
    after = resolve(trainer.train(BATCHES[2], steps=2))
    assert (after["optimizer_steps"], after["skipped_steps"]) == (2, 0)
    weights = trainer.weights()
    other = pool.build(model, ranks=ranks, train=train)
    other.train(BATCHES[0])
    assert resolve(other.train(BATCHES[2], steps=2))["lr"] == after["lr"]
    check_same_bits(other.weights(), weights)


def test_mini_batch_without_signal_makes_no_step(pool: RankPool, model: Path) -> None:
    trainer = pool.build(model, train=settings())
    first, *_ = groups_of(BATCHES[0])
    half = without_signal(BATCHES[0], groups=frozenset(groups_of(BATCHES[0])[:2]))
    assert first in {sample.group_id for sample in half.samples}
    numbers = resolve(trainer.train(half, steps=2))
    assert (numbers["optimizer_steps"], numbers["skipped_steps"]) == (1, 1)
    assert len(trainer.steps()) == 2


def test_zero_advantages_with_a_kl_term_make_a_step(
    pool: RankPool, model: Path
) -> None:
    """The term pulls back to the reference once the policy has left it."""
    trainer = pool.build(model, train=settings(), algorithm=ALGORITHM)
    trainer.train(BATCHES[0])
    silent = without_signal(BATCHES[2], groups=frozenset(groups_of(BATCHES[2])))
    numbers = resolve(trainer.train(silent))
    assert numbers["optimizer_steps"] == 1
    assert numbers["grad_norm"] > 0


@pytest.mark.parametrize(("saving", "loading"), first_quick([(1, 2), (2, 1)]))
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(
    pool: RankPool, model: Path, tmp_path: Path, saving: int, loading: int
) -> None:
    trainer = pool.build(model, ranks=saving, train=settings())
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[2], steps=2)
    expected = trainer.weights()
    resumed = pool.build(model, ranks=loading, train=settings())
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[2], steps=2)
    gap, name = worst(resumed.weights(), expected)
    assert gap < BOUND, name


def test_a_checkpoint_of_two_ranks_resumes_bit_for_bit(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    """Most parameters lie on one rank or the other, some on both."""
    pair = pool.build(model, ranks=2, train=settings())
    pair.train(BATCHES[0], steps=2)
    pair.each("save", str(tmp_path / "saved"))
    pair.train(BATCHES[2], steps=2)
    expected = pair.weights()
    resumed = pool.build(model, ranks=2, train=settings())
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[2], steps=2)
    weights = resumed.weights()
    check_same_bits(weights, expected)


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_saving_needs_the_memory_of_a_few_tensors(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    """Megatron's own saver copies the optimizer's state two or three times, and forks
    its writers. A copy to write beside training takes what the estimate says, on one
    rank."""
    model = make_tiny_model(
        tmp_path / "model", layers=12, hidden=256, heads=4, kv_heads=4
    )
    # float32, as master weights and moments are
    state = 3 * (model / "model.safetensors").stat().st_size
    trainer = pool.build(model, ranks=ranks, train=settings(train_dtype="bfloat16"))
    trainer.train(BATCHES[0])
    for method in ("export", "save"):
        folders = [str(tmp_path / method)] * ranks
        if method == "export":
            folders = [str(tmp_path / f"{method}-{rank}") for rank in range(ranks)]
        grown = trainer.call("growth", [(method, folder) for folder in folders])
        assert max(grown) < state / 4, method
    trainer.each("hold_writer")
    copies = [
        (str(tmp_path / "copied-model"), str(tmp_path / "copied")),
        ("", str(tmp_path / "copied")),
    ]
    grown = trainer.call("growth", [("copy", folders) for folders in copies[:ranks]])
    assert grown[0] == pytest.approx((2 * 2 + 12) / 12 * state, rel=0.2)
    assert max(grown[1:], default=0) < state / 4


@pytest.mark.parametrize(
    ("ranks", "dtype", "sharded"),
    first_quick([(2, "float32", True), (1, "float32", True), (1, "bfloat16", False)]),
)
def test_checkpoint_written_during_training_is_of_the_step_it_was_copied_in(
    pool: RankPool, model: Path, tmp_path: Path, ranks: int, dtype: str, sharded: bool
) -> None:
    """Byte for byte that which is written at once, whatever the steps change
    meanwhile."""
    trainer = pool.build(
        model, ranks=ranks, train=settings(train_dtype=dtype, sharded=sharded)
    )
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "at-once"))
    trainer.part([0]).each("export", str(tmp_path / "at-once-model"))
    folders = [
        (str(tmp_path / f"model-{rank}"), str(tmp_path / "beside"))
        for rank in range(ranks)
    ]
    trainer.each("hold_writer")  # until the steps have been made
    trainer.call("copy", folders)
    trainer.train(BATCHES[2], steps=2)
    written = trainer.each("finish_copy")
    entries = dict(ChainMap(*(state for _, state in written)))
    write_manifest(tmp_path / "beside", {})
    assert entries.items() <= read_entries(tmp_path / "beside").items()
    files = {
        path.relative_to(tmp_path / "at-once")
        for path in (tmp_path / "at-once").rglob("*.*")
    }
    assert len(files) >= 4
    for file in files:
        if file.name != ".metadata":  # it names the time
            expected = (tmp_path / "at-once" / file).read_bytes()
            assert (tmp_path / "beside" / file).read_bytes() == expected, file
    name = "model.safetensors"
    assert (tmp_path / "model-0" / name).read_bytes() == (
        tmp_path / "at-once-model" / name
    ).read_bytes()
    resumed = pool.build(
        model, ranks=ranks, train=settings(train_dtype=dtype, sharded=sharded)
    )
    resumed.each("load", str(tmp_path / "beside"))
    with pytest.raises(TrainError, match="not empty"):
        resumed.call("copy", folders)


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_recorded_checksums_equal_those_of_the_written_files(
    pool: RankPool, model: Path, tmp_path: Path, ranks: int
) -> None:
    """Every file whose size grows with the model is among them."""
    trainer = pool.build(model, ranks=ranks)
    for method in ("save", "export"):
        folder = tmp_path / method
        entries = dict(
            ChainMap(
                *trainer.part(range(ranks if method == "save" else 1)).each(
                    method, str(folder)
                )
            )
        )
        write_manifest(folder, {})
        assert entries.items() <= read_entries(folder).items()
        large = {
            name
            for name, entry in read_entries(folder).items()
            if entry.bytes > 100_000
        }
        assert large <= entries.keys() | {"tokenizer.json"}


def test_save_refuses_a_folder_that_is_not_empty_and_load_a_missing_folder(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    trainer = pool.build(model)
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match="not empty"):
        trainer.each("save", str(tmp_path))
    with pytest.raises(TrainError, match="no checkpoint"):
        trainer.each("load", str(tmp_path / "none"))


def save_copied(trainer: Trainer, folder: Path) -> None:
    trainer.each("copy", ("", str(folder)))
    trainer.each("write_state")


def save_at_once(trainer: Trainer, folder: Path) -> None:
    trainer.each("save", str(folder))


@pytest.mark.parametrize(
    ("rank", "file"),
    first_quick(
        [
            (1, "rank-1.pt"),
            (0, "common.pt"),
            (0, "__0_0.distcp"),
            (1, "__1_0.distcp"),
            (0, ".metadata"),
            (0, "metadata.json"),
        ]
    ),
)
@pytest.mark.parametrize("save", [save_at_once, save_copied])
def test_save_for_which_one_rank_finds_no_space_ends_on_all_and_the_next_succeeds(
    pool: RankPool,
    model: Path,
    tmp_path: Path,
    rank: int,
    file: str,
    save: Callable[[Trainer, Path], None],
) -> None:
    trainer = pool.build(model, layout=ParallelLayout(tensor=2))  # both write tensors
    trainer.train(BATCHES[0])
    folder = tmp_path / "full"
    trainer.part([rank]).each("lack_space", file)
    reason = f"rank {rank} could not write to {folder}: .*No space left on device"
    with pytest.raises(DiskFullError, match=reason):
        save(trainer, folder)
    trainer.part([rank]).each("lack_space", "")
    trainer.each("save", str(tmp_path / "saved"))
    weights = trainer.weights()
    trainer.train(BATCHES[1])
    trainer.each("load", str(tmp_path / "saved"))
    loaded = trainer.weights()
    check_same_bits(loaded, weights)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_model_for_which_there_is_no_space_keeps_no_rank_waiting(
    pool: RankPool, model: Path, tmp_path: Path, file: str
) -> None:
    """The rank that writes receives the weights of the other also if it cannot write
    them."""
    trainer = pool.build(model, layout=ParallelLayout(tensor=2))
    trainer.each("bucket_bytes", 100_000)
    trainer.part([0]).each("lack_space", file)
    with pytest.raises(OSError, match="No space left"):
        trainer.each("export", str(tmp_path / "full"))
    assert not (tmp_path / "full").exists()
    trainer.part([0]).each("lack_space", "")
    trainer.each("export", str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_steps_too_small_for_bfloat16_accumulate(pool: RankPool, model: Path) -> None:
    """A norm's weight is near 1, where bf16 has steps of 0.004 or more; Adam moves it
    by 0.0002."""
    trainer = pool.build(model, train=settings(train_dtype="bfloat16", lr=2e-4))

    def norms() -> np.ndarray:
        return np.concatenate(
            [w for name, w in trainer.weights().items() if "norm" in name]
        )

    before = norms()
    for _ in range(3):
        trainer.train(BATCHES[0])
    assert (norms() == before).all()
    for _ in range(37):
        trainer.train(BATCHES[0])
    assert (norms() != before).mean() > 0.5


@pytest.mark.parametrize(
    ("ranks", "dtype"), first_quick([(2, "float32"), (1, "float32"), (1, "bfloat16")])
)
def test_ten_steps_repeat_bit_for_bit(
    pool: RankPool, model: Path, ranks: int, dtype: str
) -> None:
    """From two builds of the same seed, under torch's deterministic algorithms."""
    runs: list[Arrays] = []
    for _ in range(2):
        train = settings(deterministic=True, train_dtype=dtype)
        trainer = pool.build(model, ranks=ranks, train=train, algorithm=ALGORITHM)
        for step in range(10):
            numbers = resolve(trainer.train(BATCHES[step % 3]))
            assert numbers["optimizer_steps"] == 1
        runs.append(trainer.weights())
    first, second = runs
    check_same_bits(first, second)


def with_advantage(batch: TrainBatch, value: float) -> TrainBatch:
    """One trained token, of one rollout, has this advantage."""
    advantages = [advantages_T.copy() for advantages_T in batch.advantages]
    advantages[2][np.flatnonzero(batch.samples[2].loss_mask_T)[0]] = value
    return replace(batch, advantages=tuple(advantages))


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
@pytest.mark.parametrize("bad", first_quick([np.nan, np.inf]))
def test_loss_that_is_not_finite_changes_no_state(
    pool: RankPool, model: Path, bad: float, ranks: int
) -> None:
    """Not even what comes after: the next batch is trained as if the bad one had never
    been. Of two ranks one has the bad token. The other mini-batch of the batch is
    trained."""
    train = settings(weight_decay=0.1, lr_decay_style="linear", lr_decay_steps=8)
    trainer = pool.build(model, ranks=ranks, train=train)
    trainer.train(BATCHES[0])
    start = trainer.weights()
    numbers = resolve(trainer.train(with_advantage(BATCHES[1], bad)))
    assert numbers["optimizer_steps"] == 0
    assert numbers["nonfinite_steps"] == 1
    assert numbers["skipped_steps"] == 0
    assert all(np.isfinite(value) for value in numbers.values()), numbers
    assert "loss" not in numbers
    check_same_bits(trainer.weights(), start)
    numbers = resolve(trainer.train(with_advantage(BATCHES[2], bad), steps=2))
    assert (numbers["optimizer_steps"], numbers["nonfinite_steps"]) == (1, 1)
    assert numbers["loss"] != 0
    after = trainer.weights()
    fresh = pool.build(model, ranks=ranks, train=train)
    fresh.train(BATCHES[0])
    second_half = mini_batches(BATCHES[2], 2)[1]
    fresh.train(second_half)
    check_same_bits(fresh.weights(), after)


def row_means(batch: TrainBatch) -> list[float]:
    """Of the advantages of each row's trained tokens."""
    means: list[float] = []
    for sample, advantages_T in zip(batch.samples, batch.advantages, strict=True):
        if sample.loss_mask_T.any():
            means.append(
                float(advantages_T[sample.loss_mask_T].astype(np.float64).mean())
            )
    return means


def token_mean(batch: TrainBatch) -> float:
    """Of the advantages of all trained tokens."""
    pairs = zip(batch.samples, batch.advantages, strict=True)
    trained = [advantages_T[sample.loss_mask_T] for sample, advantages_T in pairs]
    return float(np.concatenate(trained).astype(np.float64).mean())


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_the_loss_that_is_minimized_is_reported_beside_its_token_mean(
    pool: RankPool, model: Path, ranks: int
) -> None:
    """The weights all but stay, so that ratios are 1 and a token's loss is its
    advantage, negated."""
    train = settings(lr=1e-12)
    for aggregation in ("sequence_mean", "token_mean"):
        algorithm = AlgorithmConfig.model_validate(
            {"aggregation": aggregation, "correction": "none"}
        )
        trainer = pool.build(model, ranks=ranks, train=train, algorithm=algorithm)
        for batch in (BATCHES[0], one_rollout(BATCHES[0])):
            numbers = resolve(trainer.train(batch))
            minimized = (
                np.mean(row_means(batch))
                if aggregation == "sequence_mean"
                else token_mean(batch)
            )
            assert numbers["minimized_loss"] == pytest.approx(
                -minimized, rel=1e-5, abs=1e-7
            )
            assert numbers["loss"] == pytest.approx(
                -token_mean(batch), rel=1e-5, abs=1e-7
            )
    halves = mini_batches(BATCHES[2], 2)
    numbers = resolve(trainer.train(BATCHES[2], steps=2))
    mean_of_steps = np.mean([token_mean(half) for half in halves])
    assert numbers["minimized_loss"] == pytest.approx(
        -mean_of_steps, rel=1e-5, abs=1e-7
    )


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_too_many_nonfinite_steps_in_a_row_end_the_run(
    pool: RankPool, model: Path, ranks: int
) -> None:
    """A step between them that is finite starts the count again; mini-batches count one
    by one."""
    trainer = pool.build(model, ranks=ranks, train=settings(max_nonfinite_steps=2))
    bad = with_advantage(BATCHES[0], np.nan)
    trainer.train(bad)
    trainer.train(BATCHES[0])
    trainer.train(bad)
    weights = trainer.weights()
    with pytest.raises(
        TrainError, match=r"(?s)2 of at most 2 such steps in a row.*max-nonfinite-steps"
    ):
        trainer.train(bad)
    check_same_bits(trainer.weights(), weights)


def test_gradient_that_is_not_finite_changes_no_state(
    pool: RankPool, model: Path
) -> None:
    """The loss of this policy_loss is 0, its gradient is not a number."""
    trainer = pool.build(
        model,
        train=settings(max_nonfinite_steps=2),
        algorithm=AlgorithmConfig(policy_loss="broken_policy_loss:root_of_zero"),
    )
    start = trainer.weights()
    numbers = resolve(trainer.train(BATCHES[0]))
    assert (numbers["optimizer_steps"], numbers["nonfinite_steps"]) == (0, 1)
    with pytest.raises(TrainError, match="NaN"):
        trainer.train(BATCHES[0])
    check_same_bits(trainer.weights(), start)


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_batch_without_trained_tokens_makes_no_step(
    pool: RankPool, model: Path, ranks: int
) -> None:
    """A batch of rows without a trained token, and a batch without rows."""
    trainer = pool.build(model, ranks=ranks, train=settings(weight_decay=0.1))
    start = trainer.weights()
    row = BATCHES[0].samples[0]
    untrained = replace(row, loss_mask_T=np.zeros_like(row.loss_mask_T))
    empty = TrainBatch(
        batch_id=0,
        version=BATCHES[0].version,
        samples=(untrained, untrained),
        advantages=(np.zeros_like(BATCHES[0].advantages[0]),) * 2,
    )
    for batch in (empty, replace(empty, samples=(), advantages=())):
        numbers = resolve(trainer.train(batch, steps=2))
        assert numbers["optimizer_steps"] == 0
        assert numbers["skipped_steps"] == 0
        assert numbers["tokens"] == 0
        check_same_bits(trainer.weights(), start)


@pytest.mark.parametrize("bound", [None, 0.1])
def test_the_gradient_norm_is_bounded(
    pool: RankPool, model: Path, bound: float | None
) -> None:
    """Adam's first step under an eps far above any gradient is lr / eps times the
    clipped one."""
    trainer = pool.build(
        model,
        train=settings(clip_grad=bound, lr=1e5, sharded=False),
        megatron={"adam_eps": 1e6},
    )
    start = trainer.weights()
    norm = resolve(trainer.train(BATCHES[0]))["grad_norm"]
    (step,) = trainer.steps()
    assert norm > 0.2
    factor = 0.1 * (bound / norm if bound else 1.0)
    for name, weight in step.weights.items():
        assert weight == pytest.approx(
            start[name] - factor * step.gradients[name], rel=1e-6, abs=1e-7
        )
    moved = np.sqrt(
        sum(
            np.sum((weight - start[name]) ** 2) for name, weight in step.weights.items()
        )
    )
    assert moved == pytest.approx(0.1 * (bound or norm), rel=1e-3)


def test_rank_on_a_cpu_trains_saves_and_loads_without_torchs_tracer(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    """Importing dynamo takes longer than all that a small run computes."""
    trainer = pool.build(model, train=settings(), algorithm=ALGORITHM)
    trainer.train(BATCHES[0])
    trainer.each("save", str(tmp_path / "saved"))
    trainer.each("load", str(tmp_path / "saved"))
    trainer.train(BATCHES[0])
    assert trainer.each("has_imported", "torch._dynamo") == [False]
