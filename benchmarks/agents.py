"""By hand: unmodified agents, one after the other, for as long as you say; which turns
forked, and why. `python -m benchmarks.agents --minutes 60 --out FILE`, from the
project root. Prints the result as JSON.

The agents talk to the real gateway and router; a scripted engine says what a small
model cannot: calls as models make them and as agents store them otherwise. Each session
is judged when it ends: recorded tokens against the wire, and every fork must have a
reason and, where it departs from what was recorded, say how. Exit code 1: an agent
failed, a token differs, a fork is unexplained, or Claude Code forked more often than
twice in 50 turns beyond titles and compaction.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import client_programs
from client_programs import Ended
from scripted_agents import calculating, coding
from tiny_model import make_tiny_model
from truth_stack import Stack, scripted_stack

Agent = Callable[[Mapping[str, str], Path], Awaitable[Ended]]
"""Runs one agent on a session, in a folder of its own."""

_STEPS = (50, 12, 25)
"""Of coding agents, in turn."""
_EXAMPLES = 5
_EXPECTED = ("new_conversation", "compacted")
"""Titles and compaction: an agent's own doing."""
_MOST_FORKS_IN_50 = 2


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one agent's sessions came to."""

    sessions: int = 0
    turns: int = 0
    forks: Counter[str] = field(default_factory=Counter)
    changed: dict[str, list[dict]] = field(default_factory=dict)
    """By reason of a fork, or `rewritten`: how some requests departed from what was
    recorded."""
    rewritten: int = 0
    """Turns that go on from a reply that came back altered."""
    unexplained: list[str] = field(default_factory=list)
    mismatches: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def forks_in_50(self) -> float:
        """Forks per 50 turns beyond those that are expected."""
        forks = sum(
            count for reason, count in self.forks.items() if reason not in _EXPECTED
        )
        return round(50 * forks / max(self.turns, 1), 2)

    def add(self, turns: Sequence[Mapping]) -> None:
        """The turns of a session, as `GET /sessions/ID` lists them."""
        self.sessions += 1
        self.turns += len(turns)
        continued: set[str] = set()
        first_end = min((turn["finished_at"] for turn in turns), default=0.0)
        for number, turn in enumerate(turns):
            reason = turn["fork_reason"]
            change = turn.get("changed")
            parent = turn["parent_id"]
            if reason:
                self.forks[reason] += 1
                if change is None and reason != "new_conversation":
                    self.unexplained.append(f"{turn['id']}: {reason} of what?")
            # What begins before any answer is there has nothing to go on from.
            elif number and parent is None and turn["started_at"] > first_end:
                self.unexplained.append(f"{turn['id']}: begins anew without a reason")
            elif parent in continued:
                self.unexplained.append(
                    f"{turn['id']}: leaves its path without a reason"
                )
            if parent is not None:
                continued.add(parent)
            if change is not None:
                self.rewritten += not reason
                examples = self.changed.setdefault(reason or "rewritten", [])
                if len(examples) < _EXAMPLES and change not in examples:
                    examples.append(change)

    def shown(self) -> dict[str, object]:
        return {
            "sessions": self.sessions,
            "turns": self.turns,
            "forks": dict(self.forks),
            "forks_in_50_turns": self.forks_in_50,
            "rewritten": self.rewritten,
            "changed": self.changed,
            "unexplained": self.unexplained,
            "mismatches": dict(self.mismatches),
            "failures": self.failures,
        }


def _say(prompt: str) -> str:
    return coding(prompt) if "Work in /" in prompt else calculating(prompt)


def agents(steps: int) -> dict[str, Agent]:
    """Those that this machine can run. `steps`: of the coding agents."""

    def program(
        name: str, *flags: str, requirements: str = "requirements.txt"
    ) -> Agent:
        async def run(session: Mapping[str, str], folder: Path) -> Ended:
            python = client_programs.python(requirements)
            command = [
                str(python),
                str(client_programs.PROGRAMS / name),
                session["base_url"],
                session["key"],
            ]
            return await client_programs.run_program(
                [*command, *flags], folder=folder, env=client_programs.OFFLINE
            )

        return run

    def coder(start: Callable[..., Awaitable[Ended]], steps: int = steps) -> Agent:
        async def run(session: Mapping[str, str], folder: Path) -> Ended:
            task = f"Work in {folder / 'work'} for {steps} steps."
            return await start(task, session, folder=folder)

        return run

    async def codex(session: Mapping[str, str], folder: Path) -> Ended:
        task = "Write the result of 12*13 into answer.txt."
        return await client_programs.run_codex(task, session, folder=folder)

    def vercel(*flags: str) -> Agent:
        async def run(session: Mapping[str, str], folder: Path) -> Ended:
            return await client_programs.run_vercel_ai(session, *flags, folder=folder)

        return run

    from_pip: dict[str, Agent] = {
        "mini-swe-agent": coder(client_programs.run_mini_swe_agent),
        "pydantic-ai": program("pydantic_ai_agent.py"),
        "pydantic-ai, responses, streamed": program(
            "pydantic_ai_agent.py", "--responses", "--stream"
        ),
        "pydantic-ai, messages": program("pydantic_ai_agent.py", "--messages"),
        "langgraph": program("langgraph_agent.py"),
        "openai-agents": program("openai_agents_sdk.py"),
        "smolagents": program("smolagents_agent.py", "--auto"),
        "litellm, messages": program("litellm_client.py", "--messages"),
        "crewai": program("crewai_agent.py", requirements="requirements_crewai.txt"),
        "llama-index, react": program(
            "llama_index_react.py", requirements="requirements_llama_index.txt"
        ),
    }
    from_npm: dict[str, Agent] = {
        "claude-code": coder(client_programs.run_claude_code),
        "opencode": coder(client_programs.run_opencode),
        "codex": codex,
        "vercel-ai": vercel(),
        "vercel-ai, responses, streamed": vercel("--responses", "--stream"),
        "vercel-ai, messages": vercel("--messages"),
    }
    return from_npm | from_pip if shutil.which("npm") else from_pip


def install() -> None:
    """What the agents need, before their time begins."""
    for requirements in (
        "requirements.txt",
        "requirements_crewai.txt",
        "requirements_llama_index.txt",
    ):
        client_programs.python(requirements)
    if shutil.which("npm"):
        client_programs.npm("codex", client_programs.CODEX)
        client_programs.npm("claude-code", client_programs.CLAUDE_CODE)
        client_programs.npm("opencode", client_programs.OPENCODE)
        client_programs.npm("vercel", *client_programs.VERCEL)


async def run_for(minutes: float, only: Sequence[str]) -> dict[str, Seen]:
    """Rounds of all agents until the time is over; a round has a stack of its own,
    which bounds memory."""
    seen: dict[str, Seen] = {}
    ends_at = time.monotonic() + minutes * 60
    number = 0
    while time.monotonic() < ends_at:
        chosen = agents(_STEPS[number % len(_STEPS)])
        chosen = {
            name: agent for name, agent in chosen.items() if not only or name in only
        }
        with tempfile.TemporaryDirectory(prefix="invrl-agents-") as folder:
            place = Path(folder)
            model = make_tiny_model(place / "model", max_positions=200_000)
            async with scripted_stack(
                place, model, _say, context_length=2_000_000
            ) as stack:
                for at, (name, agent) in enumerate(chosen.items()):
                    if time.monotonic() > ends_at:
                        break
                    home = place / f"home-{at}"
                    home.mkdir()
                    await _one(stack, agent, home, seen.setdefault(name, Seen()), name)
        number += 1
    return seen


async def _one(stack: Stack, agent: Agent, home: Path, seen: Seen, name: str) -> None:
    """One session of one agent, judged."""
    session = await stack.open()
    try:
        ended = await agent(session, home)
        if ended.code:
            seen.failures.append(f"exit code {ended.code}: {ended.err[-500:]}")
    except TimeoutError:
        seen.failures.append("it did not end in time")
    view = await stack.view(session)
    seen.add(view["turns"])
    await stack.finish(session)
    verdict = await stack.verdict(session_ids=[session["id"]])
    seen.mismatches.update(verdict.kinds)
    stack.tap.generations.clear()
    print(
        f"{name}: {len(view['turns'])} turns, forks {dict(view['forks'])}",
        file=sys.stderr,
        flush=True,
    )


def _result(seen: Mapping[str, Seen], minutes: float, load: float) -> dict[str, object]:
    forks = functools.reduce(
        lambda total, one: total + one.forks, seen.values(), Counter[str]()
    )
    totals = {
        "minutes": round(minutes, 1),
        "load_before": load,
        "sessions": sum(one.sessions for one in seen.values()),
        "turns": sum(one.turns for one in seen.values()),
        "forks": dict(forks),
        "rewritten": sum(one.rewritten for one in seen.values()),
        "unexplained": sum(len(one.unexplained) for one in seen.values()),
        "mismatches": sum(one.mismatches.total() for one in seen.values()),
        "failures": sum(len(one.failures) for one in seen.values()),
    }
    return {**totals, "agents": {name: one.shown() for name, one in seen.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of agents; all unless told"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - agents(1).keys():
        parser.error(f"--only {sorted(unknown)}: the agents are {', '.join(agents(1))}")
    # the router's question whether it is gRPC
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    install()
    load = round(os.getloadavg()[0], 2)
    begun = time.monotonic()
    seen = asyncio.run(run_for(arguments.minutes, arguments.only))
    result = _result(seen, (time.monotonic() - begun) / 60, load)
    shown = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    print(shown)
    if arguments.out:
        arguments.out.write_text(shown)
    claude = seen.get("claude-code", Seen())
    faults = ("unexplained", "mismatches", "failures")
    sys.exit(
        any(result[name] for name in faults) or claude.forks_in_50 > _MOST_FORKS_IN_50
    )


if __name__ == "__main__":
    main()
