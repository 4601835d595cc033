"""Agents of 43 turns on a KV cache that holds an eighth of their tokens, on a jumping
clock: what the gate is worth as it comes."""

from __future__ import annotations

from functools import cache

import pytest
from slow_cases import first_quick
from virtual_agents import Agents, AgentsResult, drawn_agents, run_agents

from invrl.gateway.config import GateConfig
from invrl.gateway.gate.policies import program

AGENTS = Agents(slots=32, agents=48, over_subscription=8.0)


@cache
def result_of(agents: Agents, *, gated: bool) -> AgentsResult:
    max_hold_s = GateConfig.model_validate({}).max_hold_s
    result = run_agents(agents, program if gated else None, max_hold_s=max_hold_s)
    print(
        f"gated {gated}: prefix hits {result.prefix_hits:.3f}, "
        f"{result.turns_per_s:.3f} turns/s"
    )
    return result


def test_agents_lose_their_cache_without_the_gate() -> None:
    assert result_of(AGENTS, gated=False).prefix_hits < 0.1


def test_gate_keeps_the_cache_of_the_agents_that_it_lets_pass() -> None:
    result = result_of(AGENTS, gated=True)
    assert result.prefix_hits >= 0.9
    assert result.turns_held > 0


def test_gate_makes_the_agents_faster() -> None:
    gated = result_of(AGENTS, gated=True)
    assert gated.turns_per_s >= 1.5 * result_of(AGENTS, gated=False).turns_per_s


@pytest.mark.parametrize("seed", first_quick([3, 2]))
def test_gate_makes_no_agents_slower(seed: int) -> None:
    """An engine that computes these prompts quickly gains little."""
    agents = drawn_agents(seed)
    gated = result_of(agents, gated=True)
    assert gated.prefix_hits >= 0.8
    assert gated.turns_per_s >= result_of(agents, gated=False).turns_per_s


def test_gate_holds_nothing_where_the_cache_is_large_enough() -> None:
    roomy = Agents(slots=8, agents=8, over_subscription=0.4)
    gated = run_agents(roomy, program)
    assert gated.turns_held == 0
    assert gated.seconds < 1.01 * run_agents(roomy, None).seconds
