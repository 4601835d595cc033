"""Agents of 43 turns on a KV cache that holds an eighth of their tokens, on a jumping
clock: what the gate is worth."""

from __future__ import annotations

from functools import cache

from virtual_agents import Agents, AgentsResult, run_agents

from invrl.gateway.config import GateConfig
from invrl.gateway.gate.policies import program

AGENTS = Agents(slots=32, agents=48, over_subscription=8.0)


@cache
def result_of(*, gated: bool, max_hold_s: float = 1e9) -> AgentsResult:
    result = run_agents(AGENTS, program if gated else None, max_hold_s=max_hold_s)
    print(
        f"gated {gated}, held at most {max_hold_s:g} s: prefix hits {result.prefix_hits:.3f}, "
        f"{result.turns_per_s:.3f} turns/s"
    )
    return result


def test_agents_lose_their_cache_without_the_gate() -> None:
    assert result_of(gated=False).prefix_hits < 0.1


def test_gate_keeps_the_cache_of_the_agents_that_it_lets_pass() -> None:
    result = result_of(gated=True)
    assert result.prefix_hits >= 0.9
    assert result.turns_held > 0


def test_gate_makes_the_agents_faster() -> None:
    gated = result_of(gated=True)
    assert gated.turns_per_s >= 1.5 * result_of(gated=False).turns_per_s


def test_gate_is_worth_it_with_its_default_limit() -> None:
    """Turns that pass after the longest hold take some of the cache."""
    max_hold_s = GateConfig.model_validate({}).max_hold_s
    limited = result_of(gated=True, max_hold_s=max_hold_s)
    assert limited.turns_per_s >= 1.5 * result_of(gated=False).turns_per_s
    assert 0.8 < limited.prefix_hits < result_of(gated=True).prefix_hits


def test_gate_holds_nothing_where_the_cache_is_large_enough() -> None:
    roomy = Agents(slots=8, agents=8, over_subscription=0.4)
    gated = run_agents(roomy, program)
    assert gated.turns_held == 0
    assert gated.seconds < 1.01 * run_agents(roomy, None).seconds
