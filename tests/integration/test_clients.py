"""Unmodified clients, each its own conversation with a calculator, only base URL and
key given; then every token is compared with the wire (`token_truth.py`). The scripted
engine says what a small model cannot.

A program plays all its modes (whole or streamed, one API or another) in one process,
each in a session of its own; every mode is compared by itself."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import client_programs
import pytest
from scripted_agents import calculating, coding
from tiny_model import make_tiny_model
from token_truth import Reference, StoredTurn, Verdict, stored_turns
from truth_stack import Stack, real_stack, scripted_stack

from invrl.engines.fleet.fleet import Fleet
from invrl.host.processes.fork_parent import ForkParent

pytestmark = pytest.mark.timeout(1800)  # of which installing the clients may take most
ANSWERS = ["The result is 156. ✓", "The result is 56 and 99. ✓", "You are wélcome 🙂"]
RESULTS = ["156", "56", "99"]
Mode = tuple[str, ...]
WHOLE: Mode = ()
STREAMED: Mode = ("--stream",)


def modes_of(*apis: Mode) -> list[Mode]:
    """Streamed and whole over each of the APIs, which flags choose."""
    return [(*delivery, *api) for api in apis for delivery in (STREAMED, WHOLE)]


FORCED_PROGRAMS = [
    ("openai_chat.py", [STREAMED, WHOLE]),
    ("openai_responses.py", [STREAMED, WHOLE, ("--previous", "--stream")]),
    ("anthropic_messages.py", [STREAMED, WHOLE]),
    ("openai_agents_sdk.py", [STREAMED, WHOLE]),
    ("langgraph_agent.py", [WHOLE, ("--responses", "--stream")]),
    ("litellm_client.py", [STREAMED, ("--messages",)]),
]
NPM = pytest.mark.skipif(
    shutil.which("npm") is None, reason="it comes from npm, and there is no npm"
)


@pytest.fixture(scope="module")
async def stack(
    engine_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("clients")
    model = make_tiny_model(folder / "model", max_positions=200_000)

    def script(prompt: str) -> str:
        return coding(prompt) if "Work in /" in prompt else calculating(prompt)

    async with scripted_stack(
        folder, model, script, parent=engine_parent, context_length=1_000_000
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def real(
    tiny_fleet: Fleet, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("clients-real")
    # A forced call has whitespace where its grammar allows it: of 300 the longest took
    # 146 tokens.
    async with real_stack(
        folder, tiny_model, tiny_fleet, max_new_tokens=240
    ) as running:
        yield running


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A session after its end: what the store and the wire hold of it, and how they
    compare."""

    summary: dict
    """The gateway's reply to the finish."""
    verdict: Verdict
    turns: list[StoredTurn]
    last_prompt: str
    """Of the last generation, as the wire had it."""

    @property
    def is_one_path(self) -> bool:
        return (self.verdict.roots, self.verdict.continued) == (
            1,
            self.verdict.turns - 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A program's conversation in one of its modes."""

    mode: Mode
    printed: dict
    """What the program itself saw."""
    conversation: Conversation


async def end_session(stack: Stack, session: dict, *, min_turns: int) -> Conversation:
    """Finishes the session and checks that the store and the wire agree on every
    token."""
    summary = await stack.finish(session)
    verdict = await stack.verdict(session_ids=[session["id"]])
    assert verdict.mismatches == []
    assert verdict.turns == summary.get("num_turns", verdict.turns) >= min_turns
    assert (verdict.aborted, verdict.unrecorded) == (0, 0)
    store = Path(stack.settings.store_path)
    turns = [turn for turn in stored_turns(store) if turn.session_id == session["id"]]
    last = next(
        generation
        for generation in stack.tap.generations
        if generation.rid == turns[-1].id
    )
    last_prompt = Reference(stack.model).tokenizer.decode(last.input_ids)
    return Conversation(
        summary=summary, verdict=verdict, turns=turns, last_prompt=last_prompt
    )


async def play(
    stack: Stack,
    folder: Path,
    program: str,
    modes: Sequence[Mode],
    *,
    min_turns: int = 3,
) -> list[Play]:
    """Plays the program in all modes, then ends each session."""
    sessions = [await stack.open() for _ in modes]
    printed = await client_programs.run_every_mode(
        program, sessions, modes, folder=folder
    )
    plays: list[Play] = []
    for mode, session, seen in zip(modes, sessions, printed, strict=True):
        conversation = await end_session(stack, session, min_turns=min_turns)
        plays.append(Play(mode=mode, printed=seen, conversation=conversation))
    return plays


def assert_calculated(played: Play, *, in_order: bool = True) -> None:
    """All answers and results arrived, in five turns of one path, and the last prompt
    holds all of them. `in_order`: the agent calls its tools one after the other."""
    results = played.printed["results"]
    assert played.printed["answers"] == ANSWERS
    assert (results if in_order else sorted(results)) == (
        RESULTS if in_order else sorted(RESULTS)
    )
    assert played.conversation.is_one_path
    assert played.conversation.verdict.turns == 5
    said = [
        "calculator",
        "What is 12*13?",
        "<tool_call>",
        "156",
        ANSWERS[0],
        "And 7*8, and 9*11?",
    ]
    said += ["<tool_call>", "<tool_call>", "56", "99", ANSWERS[1], "Thank you 🙂"]
    end = 0
    for text in said:
        end = played.conversation.last_prompt.index(text, end) + len(text)


async def test_openai_chat_is_recorded_as_the_wire_had_it(stack: Stack, tmp_path: Path):
    for played in await play(stack, tmp_path, "openai_chat.py", [STREAMED, WHOLE]):
        assert_calculated(played)
        assert played.printed["models"] == ["scripted"]
        assert played.printed["finishes"] == [
            "tool_calls",
            "stop",
            "tool_calls",
            "stop",
            "stop",
        ]
        assert played.printed["tokens"] == played.conversation.verdict.sampled_tokens


async def test_openai_responses_are_recorded_as_the_wire_had_them(
    stack: Stack, tmp_path: Path
):
    modes = modes_of((), ("--previous",))
    for played in await play(stack, tmp_path, "openai_responses.py", modes):
        assert_calculated(played)
        assert played.printed["status"] == "completed"
        is_streamed = "--stream" in played.mode
        # one in each turn at least
        assert (played.printed["deltas"] >= 5) is is_streamed


async def test_openai_completions_are_recorded_as_the_wire_had_them(
    stack: Stack, tmp_path: Path
):
    for played in await play(
        stack, tmp_path, "openai_completions.py", [STREAMED, WHOLE]
    ):
        assert all(played.printed["answers"])
        assert played.conversation.is_one_path
        assert played.conversation.verdict.turns == 4


async def test_anthropic_messages_are_recorded_as_the_wire_had_them(
    stack: Stack, tmp_path: Path
):
    for played in await play(
        stack, tmp_path, "anthropic_messages.py", [STREAMED, WHOLE]
    ):
        assert_calculated(played)
        assert played.printed["stops"] == [
            "tool_use",
            "end_turn",
            "tool_use",
            "end_turn",
            "end_turn",
        ]


async def test_google_generate_content_is_recorded_as_the_wire_had_it(
    stack: Stack, tmp_path: Path
):
    for played in await play(stack, tmp_path, "google_genai.py", [STREAMED, WHOLE]):
        assert_calculated(played)
        assert played.printed["finishes"] == ["STOP", "STOP", "STOP"]
        assert played.printed["models"] == ["models/scripted"]
        assert played.printed["counted"] == sorted(played.printed["counted"])


@pytest.mark.parametrize(
    ("program", "modes", "in_order"),
    [
        pytest.param(
            "langgraph_agent.py", modes_of((), ("--responses",)), False, id="langgraph"
        ),
        pytest.param(
            "openai_agents_sdk.py",
            modes_of((), ("--responses",)),
            False,
            id="openai-agents",
        ),
        pytest.param(
            "litellm_client.py", modes_of((), ("--messages",)), True, id="litellm"
        ),
        pytest.param(
            "pydantic_ai_agent.py",
            modes_of((), ("--responses",), ("--messages",)),
            False,
            id="pydantic-ai",
        ),
        pytest.param(
            "google_adk_agent.py",
            [STREAMED, WHOLE],
            True,
            id="google-adk",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "vercel_ai.mjs",
            modes_of((), ("--responses",), ("--messages",)),
            True,
            id="vercel-ai",
            marks=NPM,
        ),
    ],
)
async def test_an_agent_of_a_framework_is_recorded_as_one_path(
    stack: Stack, tmp_path: Path, program: str, modes: list[Mode], in_order: bool
):
    for played in await play(stack, tmp_path, program, modes):
        assert_calculated(played, in_order=in_order)


async def test_a_smolagents_agent_forks_in_each_turn_and_is_trained_only_without_forced_calls(
    stack: Stack, tmp_path: Path
):
    """It writes its calls into the history as text of its own, so its conversations
    fork; and it forces its calls, so that none of its tokens may be trained unless it
    is told otherwise."""
    modes = modes_of((), ("--auto",))
    for played in await play(stack, tmp_path, "smolagents_agent.py", modes):
        is_free = "--auto" in played.mode
        verdict = played.conversation.verdict
        assert played.printed == {"answers": ["156", "99"], "results": ["156", "99"]}
        assert (verdict.roots, verdict.turns) == (4, 4)
        assert verdict.constrained == (0 if is_free else 4)
        assert played.conversation.summary["outcome"] == (
            "finished" if is_free else "failed"
        )


CodingAgent = Callable[..., Awaitable[client_programs.Ended]]


async def forks_of_a_coding_agent(
    stack: Stack, folder: Path, run: CodingAgent, steps: int
) -> list[dict]:
    """Runs a coding agent for some steps in `folder`/work. Returns the turns that
    forked."""
    session = await stack.open()
    ended = await run(
        f"Work in {folder / 'work'} for {steps} steps.", session, folder=folder
    )
    assert ended.code == 0, ended.err[-3000:]
    view = await stack.view(session)
    await end_session(stack, session, min_turns=steps)
    forked = [turn for turn in view["turns"] if turn["fork_reason"]]
    assert all(
        "changed" in turn or turn["fork_reason"] == "new_conversation"
        for turn in forked
    )
    return forked


@NPM
async def test_claude_code_continues_one_conversation(stack: Stack, tmp_path: Path):
    """It adds defaults to its calls, trims the files that it writes, takes `cd DIR &&`
    off its commands: all of it one conversation, but for a title perhaps."""
    forked = await forks_of_a_coding_agent(
        stack, tmp_path, client_programs.run_claude_code, 14
    )
    assert [turn for turn in forked if turn["fork_reason"] != "new_conversation"] == []
    assert (tmp_path / "work/file2.py").read_text().startswith("def f():")
    assert (
        tmp_path / "work/file1.py"
    ).read_text() == "def f():\n    return  \t1 + 6\n\n\n"


@NPM
@pytest.mark.slow
async def test_opencode_continues_one_conversation(stack: Stack, tmp_path: Path):
    forked = await forks_of_a_coding_agent(
        stack, tmp_path, client_programs.run_opencode, 14
    )
    assert {turn["fork_reason"] for turn in forked} <= {"new_conversation"}  # a title
    assert (tmp_path / "work/file2.py").read_text().startswith("def f():")


async def test_mini_swe_agent_continues_one_conversation(stack: Stack, tmp_path: Path):
    assert (
        await forks_of_a_coding_agent(
            stack, tmp_path, client_programs.run_mini_swe_agent, 6
        )
        == []
    )
    assert (tmp_path / "work/steps.txt").read_text().split() == list("012345")


@NPM
@pytest.mark.slow
async def test_gemini_cli_continues_one_conversation(stack: Stack, tmp_path: Path):
    forked = await forks_of_a_coding_agent(
        stack, tmp_path, client_programs.run_gemini_cli, 14
    )
    assert {turn["fork_reason"] for turn in forked} <= {"new_conversation"}
    assert (tmp_path / "work/file2.py").read_text().startswith("def f():")


@NPM
async def test_codex_does_a_task_with_its_own_shell_tool(stack: Stack, tmp_path: Path):
    """A small task, which must leave a file."""
    session = await stack.open()
    ended = await client_programs.run_codex(
        "Write the result of 12*13 into answer.txt.", session, folder=tmp_path
    )
    assert ended.code == 0, ended.err[-3000:]
    assert (tmp_path / "work/answer.txt").read_text() == "156\n"
    assert "The result is" in ended.out
    await end_session(stack, session, min_turns=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "modes"),
    FORCED_PROGRAMS,
    ids=[program for program, _ in FORCED_PROGRAMS],
)
async def test_a_real_engine_makes_the_calls_that_a_client_forces(
    real: Stack, tmp_path: Path, program: str, modes: list[Mode]
):
    """The same conversations, where a random model must call: its grammar leaves it
    three expressions. Its answers are cut off: the Agents SDK fails on that in its
    responses mode."""
    forced_modes = [(*mode, "--forced") for mode in modes]
    for played in await play(real, tmp_path, program, forced_modes):
        assert len(played.printed["results"]) >= 3
        assert set(played.printed["results"]) <= set(RESULTS)
        assert played.conversation.verdict.constrained >= 3
        assert played.conversation.verdict.turns >= 6


@pytest.mark.slow
async def test_smolagents_forces_the_calls_of_a_real_engine(
    real: Stack, tmp_path: Path
):
    """By itself, in every step but the last resort after four. Which tool is left to
    the model, and what `final_answer` is told may be cut off: then there was no
    call."""
    [played] = await play(
        real, tmp_path, "smolagents_agent.py", [STREAMED], min_turns=2
    )
    verdict = played.conversation.verdict
    assert len(played.printed["answers"]) == 2
    assert set(played.printed["results"]) <= set(RESULTS)
    assert verdict.turns - 2 <= verdict.constrained <= 8
    assert verdict.constrained >= 2


@pytest.mark.slow
async def test_completions_of_a_real_engine_continue_the_latest_reply_that_shows_all_of_itself(
    real: Stack, tmp_path: Path
):
    """A reply may hold tokens that its text does not show: its end, or a special token
    within. What goes on from the text leaves such a reply out, and continues the latest
    one before that shows all of itself."""
    added = Reference(real.model).tokenizer.added_tokens_decoder
    hidden = {token_id for token_id, token in added.items() if token.special}
    for played in await play(
        real, tmp_path, "openai_completions.py", [STREAMED, WHOLE]
    ):
        turns = played.conversation.turns
        latest = None
        parents = []
        for turn in turns:
            parents.append(latest)
            if hidden.isdisjoint(turn.sampled_ids):
                latest = turn.id
        assert [turn.parent_id for turn in turns] == parents
        assert len(parents) == 4


@pytest.mark.slow
@NPM
async def test_codex_continues_one_conversation_of_a_real_engine(
    real: Stack, tmp_path: Path
):
    """Codex cannot force a call, and fails a reply that is cut off. So the random model
    may talk until it ends by itself; a short system prompt and fewer tools leave room
    for that. Two turns of one conversation: what Codex holds for the reply is what the
    wire had."""
    (tmp_path / "prompt.md").write_text("You are a coding agent.")
    settings: dict[str, str | bool] = {
        "model_instructions_file": str(tmp_path / "prompt.md")
    }
    settings |= {f"features.{name}": False for name in ("multi_agent", "goals")}
    for attempt in range(5):  # one reply in fifty or so has not ended by then
        folder = tmp_path / str(attempt)
        folder.mkdir()
        session = await real.open(purpose="serve", sampling={"max_new_tokens": 4096})
        for again in (False, True):
            ended = await client_programs.run_codex(
                "Say a word.", session, folder=folder, again=again, settings=settings
            )
            if (reply := real.tap.generations[-1]).finish == "length":
                break
            assert ended.code == 0, ended.err[-3000:]
            text = Reference(real.model).tokenizer.decode(
                reply.ids, skip_special_tokens=False
            )
            # read_text would translate its newlines
            held = (folder / "last.txt").read_bytes().decode()
            assert held.strip() == text.removesuffix("<|im_end|>").strip()
        else:
            await end_session(real, session, min_turns=2)
            return
    raise AssertionError("no conversation of five ended by itself")
