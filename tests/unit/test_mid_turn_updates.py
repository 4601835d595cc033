import numpy as np
import torch
from loss_samples import one_row, tokens_alone

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.train.step.mid_turn_updates import sampled_after_update
from invrl.types.batches import TrainSample
from invrl.types.metrics import resolve
from invrl.types.weights import WeightVersion


def sample_of(versions: list[int]) -> TrainSample:
    """A row whose tokens have these versions; -1 for context."""
    versions_T = np.array(versions, np.int32)
    return TrainSample(
        tokens_T=np.zeros(len(versions), np.int32),
        loss_mask_T=versions_T >= 0,
        rollout_logprobs_T=np.zeros(len(versions), np.float32),
        versions_T=versions_T,
        reward=0.0,
        temperature=1.0,
        group_id="group",
        rollout_id="rollout",
        attempt=0,
        turn_ids=(),
    )


def test_newest_version_tokens_of_a_turn_begun_under_older_weights_count() -> None:
    sample = sample_of([-1, 3, 3, 4, 4, -1, 4, 4, -1, 2, 3, 4])
    #       context,    turn that spans,  turn of 4,  turn that spans two updates
    expected = [3, 4, 11]
    assert (
        np.flatnonzero(sampled_after_update(sample, WeightVersion(4))).tolist()
        == expected
    )


def test_no_token_counts_if_no_turn_spans_an_update() -> None:
    sample = sample_of([-1, 3, 3, -1, 4, 4])
    assert not sampled_after_update(sample, WeightVersion(4)).any()
    assert not sampled_after_update(sample, WeightVersion(5)).any()
    assert not sampled_after_update(sample_of([-1, -1]), WeightVersion(5)).any()


def gap_metrics(after_update: list[bool] | None) -> dict[str, float]:
    inputs = LossInputs(
        current_N=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        old_N=None,
        rollout_N=torch.tensor([-1.0, -2.5, -3.25]),
        advantages_N=torch.ones(3),
        reference_N=None,
        entropy_N=None,
        samples=one_row(3),
        denominators=tokens_alone(3.0),
        after_update_N=None if after_update is None else torch.tensor(after_update),
    )
    return resolve(policy_loss(inputs, AlgorithmConfig()).metrics)


def test_gap_after_an_update_is_over_spanning_turns_only() -> None:
    metrics = gap_metrics([False, True, True])
    assert metrics["logprob_gap_after_update_mean"] == 0.375
    assert metrics["logprob_gap_after_update_max"] == 0.5
    assert metrics["logprob_gap_mean"] == 0.25


def test_gap_after_an_update_is_absent_without_spanning_turns() -> None:
    assert "logprob_gap_after_update_mean" not in gap_metrics(None)
