"""The staged example of launch/configs: its settings resolve; its conversations are of
the training split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invrl.run.settings.config import read_toml, resolve
from rollout_fns.calculator import held_out, parse_call

FOLDER = Path(__file__).parents[2] / "launch" / "configs"


@pytest.mark.parametrize("name", ["calculator_sft.toml", "calculator_rl.toml"])
def test_staged_example_settings_resolve_and_are_documented(name: str) -> None:
    config = resolve(read_toml(FOLDER / name))
    assert config.run.num_steps > 0
    assert f"--config launch/configs/{name}" in (FOLDER / "README.md").read_text()


def test_staged_example_has_no_conversation_of_a_held_out_problem() -> None:
    """Each trains one call and one answer, and both are right."""
    lines = (FOLDER / "calculator.jsonl").read_text().splitlines()
    assert len(lines) == 48
    for line in lines:
        messages = json.loads(line)["messages"]
        trained = [
            m["content"]
            for m in messages
            if m["role"] == "assistant" and m.get("weight", 1)
        ]
        call, answer = trained
        operands = parse_call(call)
        assert operands is not None
        assert not held_out(*operands)
        assert int(answer) == operands[0] * operands[1]
