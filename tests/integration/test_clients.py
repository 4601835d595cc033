"""Unmodified clients, each its own conversation with a calculator, only base URL and key given; then every
token is compared with the wire (`token_truth.py`). The scripted engine says what a small model cannot."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import client_programs
import pytest
from scripted_agents import calculating, coding
from slow_cases import first_quick
from tiny_model import make_tiny_model
from token_truth import Reference, stored_turns
from truth_stack import Stack, real_stack, scripted_stack

from invrl.engines.fleet import Fleet

pytestmark = pytest.mark.timeout(1800)  # of which installing the clients may take most
ANSWERS = ["The result is 156. ✓", "The result is 56 and 99. ✓", "You are wélcome 🙂"]
RESULTS = ["156", "56", "99"]
STREAMED_AND_WHOLE = [["--stream"], []]
FORCED = [
    *(
        [program, *flags]
        for program in (
            "openai_chat.py",
            "openai_responses.py",
            "anthropic_messages.py",
            "openai_agents_sdk.py",
        )
        for flags in STREAMED_AND_WHOLE
    ),
    ["openai_responses.py", "--previous", "--stream"],
    ["langgraph_agent.py"],
    ["langgraph_agent.py", "--responses", "--stream"],
    ["litellm_client.py", "--stream"],
    ["litellm_client.py", "--messages"],
]
NPM = pytest.mark.skipif(shutil.which("npm") is None, reason="it comes from npm, and there is no npm")
OPENAI_AND_ANTHROPIC = [[], ["--responses"], ["--messages"]]


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("clients")
    model = make_tiny_model(folder / "model", max_positions=200_000)

    def script(prompt: str) -> str:
        return coding(prompt) if "Work in /" in prompt else calculating(prompt)

    async with scripted_stack(folder, model, script, context_length=1_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def python() -> Path:
    return client_programs.python()


@pytest.fixture(scope="module")
async def real(
    tiny_fleet: Fleet, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("clients-real")
    # A forced call has whitespace where its grammar allows it: of 300 the longest took 146 tokens.
    async with real_stack(folder, tiny_model, tiny_fleet, max_new_tokens=240) as running:
        yield running


class Talk:
    """One program's session, from its start to the verdict."""

    def __init__(self, stack: Stack, python: Path, folder: Path) -> None:
        self.stack, self.python, self.folder = stack, python, folder

    async def run(self, name: str, *flags: str, turns: int = 3) -> dict:
        session = await self.stack.open()
        program = str(client_programs.PROGRAMS / name)
        command = [str(self.python), program, session["base_url"], session["key"], *flags]
        seen = (await client_programs.run_program(command, folder=self.folder)).seen
        await self.judged(session, turns=turns)
        return seen

    async def judged(self, session: dict, *, turns: int = 3) -> None:
        """The session's end: 0 mismatches, and one conversation that only went on."""
        self.summary = await self.stack.finish(session)
        self.verdict = await self.stack.verdict(session_ids=[session["id"]])
        assert self.verdict.mismatches == []
        assert self.verdict.turns == self.summary.get("num_turns", self.verdict.turns) >= turns
        assert (self.verdict.aborted, self.verdict.unrecorded) == (0, 0)
        self.turns = [one for one in stored_turns(self.store) if one.session_id == session["id"]]
        last = next(one for one in self.stack.tap.generations if one.rid == self.turns[-1].id)
        self.last_prompt = Reference(self.stack.model).tokenizer.decode(last.input_ids)

    @property
    def store(self) -> Path:
        return Path(self.stack.settings.store_path)

    @property
    def one_path(self) -> bool:
        return (self.verdict.roots, self.verdict.continued) == (1, self.verdict.turns - 1)


def assert_whole(prompt: str) -> None:
    """The prompt on the wire holds all that was said, in its order."""
    said = ["calculator", "What is 12*13?", "<tool_call>", "156", ANSWERS[0], "And 7*8, and 9*11?"]
    said += ["<tool_call>", "<tool_call>", "56", "99", ANSWERS[1], "Thank you 🙂"]
    at = 0
    for text in said:
        at = prompt.index(text, at) + len(text)


@pytest.fixture
def talk(stack: Stack, python: Path, tmp_path: Path) -> Talk:
    return Talk(stack, python, tmp_path)


@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_openai_chat(talk: Talk, flags: list[str]):
    seen = await talk.run("openai_chat.py", *flags)
    assert (seen["answers"], seen["results"], seen["models"]) == (ANSWERS, RESULTS, ["scripted"])
    assert seen["finishes"] == ["tool_calls", "stop", "tool_calls", "stop", "stop"]
    assert (talk.one_path, talk.verdict.turns, talk.verdict.sampled_tokens) == (True, 5, seen["tokens"])
    assert_whole(talk.last_prompt)


@pytest.mark.parametrize("more", first_quick([[], ["--previous"]]))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_openai_responses(talk: Talk, flags: list[str], more: list[str]):
    seen = await talk.run("openai_responses.py", *flags, *more)
    assert (seen["answers"], seen["results"], seen["status"]) == (ANSWERS, RESULTS, "completed")
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)
    assert (seen["deltas"] >= 5) is bool(flags)  # one in each turn at least


@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_openai_completions(talk: Talk, flags: list[str]):
    seen = await talk.run("openai_completions.py", *flags)
    assert all(seen["answers"])
    assert (talk.one_path, talk.verdict.turns) == (True, 4)


@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_anthropic_messages(talk: Talk, flags: list[str]):
    seen = await talk.run("anthropic_messages.py", *flags)
    assert (seen["answers"], seen["results"]) == (ANSWERS, RESULTS)
    assert seen["stops"] == ["tool_use", "end_turn", "tool_use", "end_turn", "end_turn"]
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)


@pytest.mark.parametrize("more", first_quick([[], ["--responses"]]))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_a_langgraph_agent(talk: Talk, flags: list[str], more: list[str]):
    seen = await talk.run("langgraph_agent.py", *flags, *more)
    assert (seen["answers"], sorted(seen["results"])) == (ANSWERS, sorted(RESULTS))
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)


@pytest.mark.parametrize("more", first_quick([[], ["--responses"]]))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_an_agent_of_the_openai_agents_sdk(talk: Talk, flags: list[str], more: list[str]):
    seen = await talk.run("openai_agents_sdk.py", *flags, *more)
    assert (seen["answers"], sorted(seen["results"])) == (ANSWERS, sorted(RESULTS))
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)


@pytest.mark.parametrize("more", first_quick([[], ["--auto"]]))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_a_smolagents_agent(talk: Talk, flags: list[str], more: list[str]):
    """It writes its calls into the history as text of its own, so its conversations fork; and it forces its
    calls, so that none of its tokens may be trained unless it is told otherwise."""
    seen = await talk.run("smolagents_agent.py", *flags, *more)
    assert (seen["answers"], seen["results"]) == (["156", "99"], ["156", "99"])
    assert (talk.verdict.roots, talk.verdict.turns) == (4, 4)
    assert talk.verdict.constrained == (0 if more else 4)
    assert talk.summary["outcome"] == ("finished" if more else "failed")


@pytest.mark.parametrize("more", first_quick([[], ["--messages"]]))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_litellm(talk: Talk, flags: list[str], more: list[str]):
    seen = await talk.run("litellm_client.py", *flags, *more)
    assert (seen["answers"], seen["results"]) == (ANSWERS, RESULTS)
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)


@pytest.mark.parametrize("more", first_quick(OPENAI_AND_ANTHROPIC))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_an_agent_of_pydantic_ai(talk: Talk, flags: list[str], more: list[str]):
    seen = await talk.run("pydantic_ai_agent.py", *flags, *more)
    assert (seen["answers"], sorted(seen["results"])) == (ANSWERS, sorted(RESULTS))
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)


@NPM
@pytest.mark.parametrize("more", first_quick(OPENAI_AND_ANTHROPIC))
@pytest.mark.parametrize("flags", first_quick(STREAMED_AND_WHOLE))
async def test_vercels_ai(talk: Talk, stack: Stack, tmp_path: Path, flags: list[str], more: list[str]):
    session = await stack.open()
    seen = (await client_programs.run_vercel_ai(session, *flags, *more, folder=tmp_path)).seen
    await talk.judged(session)
    assert (seen["answers"], seen["results"]) == (ANSWERS, RESULTS)
    assert (talk.one_path, talk.verdict.turns) == (True, 5)
    assert_whole(talk.last_prompt)


async def coded(talk: Talk, run: Callable[..., Awaitable[client_programs.Ended]], steps: int) -> list[dict]:
    """A coding agent does its steps in a folder, each by tools of its own; the turns that forked."""
    session = await talk.stack.open()
    work = talk.folder / "work"
    ended = await run(f"Work in {work} for {steps} steps.", session, folder=talk.folder)
    assert ended.code == 0, ended.err[-3000:]
    view = await talk.stack.view(session)
    await talk.judged(session, turns=steps)
    forked = [turn for turn in view["turns"] if turn["fork_reason"]]
    assert all("changed" in turn or turn["fork_reason"] == "new_conversation" for turn in forked)
    return forked


@NPM
async def test_claude_code(talk: Talk):
    """It adds defaults to its calls, trims the files that it writes, takes `cd DIR &&` off its commands: all
    of it one conversation, but for a title perhaps."""
    forked = await coded(talk, client_programs.run_claude_code, 14)
    assert [turn for turn in forked if turn["fork_reason"] != "new_conversation"] == []
    assert (talk.folder / "work/file2.py").read_text().startswith("def f():")
    assert (talk.folder / "work/file1.py").read_text() == "def f():\n    return  \t1 + 6\n\n\n"


@NPM
async def test_opencode(talk: Talk):
    forked = await coded(talk, client_programs.run_opencode, 14)
    assert {turn["fork_reason"] for turn in forked} <= {"new_conversation"}  # a title
    assert (talk.folder / "work/file2.py").read_text().startswith("def f():")


async def test_mini_swe_agent(talk: Talk):
    assert await coded(talk, client_programs.run_mini_swe_agent, 6) == []
    assert (talk.folder / "work/steps.txt").read_text().split() == list("012345")


@NPM
async def test_codex(talk: Talk, stack: Stack, tmp_path: Path):
    """A small task through its own shell tool: it must leave a file."""
    session = await stack.open()
    ended = await client_programs.run_codex(
        "Write the result of 12*13 into answer.txt.", session, folder=tmp_path
    )
    assert ended.code == 0, ended.err[-3000:]
    assert (tmp_path / "work/answer.txt").read_text() == "156\n"
    assert "The result is" in ended.out
    await talk.judged(session, turns=2)


@pytest.mark.parametrize("program", first_quick(FORCED), ids=" ".join)
async def test_forced_calls_of_a_real_engine(real: Stack, python: Path, tmp_path: Path, program: list[str]):
    """The same conversations, where a random model must call: its grammar leaves it three expressions. Its
    answers are cut off: the Agents SDK fails on that in its responses mode."""
    talk = Talk(real, python, tmp_path)
    seen = await talk.run(*program, "--forced")
    assert len(seen["results"]) >= 3
    assert set(seen["results"]) <= set(RESULTS)
    assert talk.verdict.constrained >= 3
    assert talk.verdict.turns >= 6


@pytest.mark.slow
async def test_smolagents_forces_a_real_engine(real: Stack, python: Path, tmp_path: Path):
    """By itself, in every step but the last resort after four. Which tool is left to the model, and what
    `final_answer` is told may be cut off: then there was no call."""
    talk = Talk(real, python, tmp_path)
    seen = await talk.run("smolagents_agent.py", "--stream", turns=2)
    assert len(seen["answers"]) == 2
    assert set(seen["results"]) <= set(RESULTS)
    assert talk.verdict.turns - 2 <= talk.verdict.constrained <= 8
    assert talk.verdict.constrained >= 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", STREAMED_AND_WHOLE)
async def test_completions_of_a_real_engine(real: Stack, python: Path, tmp_path: Path, flags: list[str]):
    """A reply may hold tokens that its text does not show: its end, or a special token within. What goes
    on from the text leaves such a reply out, and continues the latest one before that shows all of itself."""
    talk = Talk(real, python, tmp_path)
    await talk.run("openai_completions.py", *flags)
    added = Reference(real.model).tokenizer.added_tokens_decoder
    hidden = {token_id for token_id, token in added.items() if token.special}
    latest, parents = None, []
    for turn in talk.turns:
        parents.append(latest)
        if hidden.isdisjoint(turn.sampled_ids):
            latest = turn.id
    assert [turn.parent_id for turn in talk.turns] == parents
    assert len(parents) == 4


@pytest.mark.slow
@NPM
async def test_codex_and_a_real_engine(real: Stack, python: Path, tmp_path: Path):
    """Codex cannot force a call, and fails a reply that is cut off. So the random model may talk until it
    ends by itself; a short system prompt and fewer tools leave room for that. Two turns of one conversation:
    what Codex holds for the reply is what the wire had."""
    (tmp_path / "prompt.md").write_text("You are a coding agent.")
    settings: dict[str, str | bool] = {"model_instructions_file": str(tmp_path / "prompt.md")}
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
            text = Reference(real.model).tokenizer.decode(reply.ids, skip_special_tokens=False)
            held = (folder / "last.txt").read_bytes().decode()  # read_text would translate its newlines
            assert held.strip() == text.removesuffix("<|im_end|>").strip()
        else:
            return await Talk(real, python, folder).judged(session, turns=2)
    raise AssertionError("no conversation of five ended by itself")
