"""A whole run that trains an adapter and sends it alone: it learns, pauses no engine,
and records each token with the version of the adapter that made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_folders import adapted_model

from e2e.recorded_turns import logprobs, recorded_turns
from e2e.runs import DEADLINE_S, STEPS, steps_of, train

ADAPTER = (
    *("--lora.rank", "4", "--lr", "5e-3"),
    *("--weights.transport", "adapter"),
)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_an_adapter_is_trained_and_updated_without_a_pause(folder: Path) -> None:
    """Two engines and a staleness of 1: requests run while engines load the next
    version. Each recorded log-prob is that of the adapter which its version names."""
    run = train(
        folder,
        "adapter",
        *ADAPTER,
        *("--max-staleness", "1", "--num-engines", "2"),
        *("--save-interval", "1", "--no-checkpoints.keep"),
    )
    steps = steps_of(run)
    assert len(steps) == STEPS
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert sum(rewards[-4:]) - sum(rewards[:4]) > 4 * 0.1, "it does not learn"
    assert [step["sync/paused_s"] for step in steps] == [0.0] * STEPS
    turns = recorded_turns(run)
    assert all(len(turn.versions) == len(turn.sampled) > 0 for turn in turns)
    assert all(len(set(turn.versions)) == 1 for turn in turns), "a version was left"
    found = {turn.versions[0] for turn in turns}
    assert set(range(STEPS)) <= found
    for version in sorted(found - {0}):
        adapter = run / f"checkpoints/step-{version:06}/hugging_face"
        model = adapted_model(folder / "model", adapter)
        for turn in turns:
            if turn.versions[0] == version:
                gap_T = np.abs(logprobs(model, turn) - turn.logprobs_T)
                assert gap_T.max() < 1e-3, (version, gap_T.max())
