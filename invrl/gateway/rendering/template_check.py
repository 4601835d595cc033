"""`invrl check-template`: proves for a model folder that conversations continue exactly.

Every conversation of the corpus is rendered in two ways. One is the gateway's: turn by turn from recorded
ids, with each reply spelled as the tokenizer spells the template's own rendering of it. The other is the
template's rendering of the whole conversation. Both must give the same ids, or the gateway must have recorded
why it started a new branch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from invrl.errors import SessionError
from invrl.gateway.rendering.renderer import Renderer, Tail
from invrl.gateway.rendering.thinking import END_THINK, THINK
from invrl.gateway.types import ADVICE, Message, Prompt, Tool, ToolCall

Verdict = Literal["exact", "kept", "forks", "refused", "wrong"]
_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "forks", "kept", "exact")
MEANING = {
    "exact": "the ids are those of the template's own rendering",
    "kept": "goes on from what was sampled, where the template would now show other thinking or whitespace",
    "forks": "a turn starts a new branch, rendered from the beginning",
    "refused": "the template does not take such conversations: the agent gets a 400",
    "wrong": "neither exact nor a recorded fork: report it, and do not train on such conversations",
}
_FORK_ADVICE = {reason.value: advice for reason, advice in ADVICE.items()}
_FORK_ADVICE["template_changed"] = (
    "the template writes such a reply otherwise than it asks for it, or without an end of"
    " turn; another template can be given: --chat-template-path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one conversation of the corpus."""

    pattern: str
    outcome: Verdict
    reason: str


_CITY = "Ürümqi"
_ARGUMENTS = f'{{"city": "{_CITY}", "days": [1, 2]}}'
_PARAMETERS = '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}'
_TOOLS = (Tool(name="get_weather", description="The weather.", parameters=_PARAMETERS), Tool(name="halt"))


def _reply_with_calls(*numbers: int, arguments: str = _ARGUMENTS) -> Message:
    calls = [ToolCall(f"callid{number:03}", "get_weather", arguments) for number in numbers]
    return Message("assistant", tool_calls=tuple(calls))


def _result(number: int) -> Message:
    return Message("tool", f'{{"sky": "{number}"}}', tool_call_id=f"callid{number:03}")


_SYSTEM = Message("system", "Be brief.")
_BRIEFER = Message("system", "Be briefer.")
_ASK = Message("user", "Hello?")
_MORE = Message("user", "And then?")
_LAST = Message("user", "Thank you.")
_REPLY = Message("assistant", "Yes, of course.")
_THOUGHT = replace(_REPLY, reasoning="Let me see.\n\nIt is so.")
_CALL = _reply_with_calls(1)
_TWO_CALLS = _reply_with_calls(1, 2)
_LATER_CALL = _reply_with_calls(3)
_TEXT_AND_CALL = replace(_CALL, content="I look.")
_CALL_WITHOUT_ARGUMENTS = _reply_with_calls(1, arguments="{}")
_CUT_CALL = _reply_with_calls(1, arguments='{"city": "Ür')
_THOUGHT_AND_CALL = replace(_CALL, reasoning="I need the weather.")
_RESULT = _result(1)
_RESULTS = (_result(1), _result(2))
_LATER_RESULT = _result(3)
_UNICODE = (
    Message("user", "漢字 und Ünïcödé 🙂\u200d🔥"),
    Message("assistant", "zero\u00a0width\u200b"),
    Message("user", "\ttabs\n\n\nand  spaces"),
    Message("assistant", "كيف الحال؟"),
)
_MARKUP = Message("user", "<think>a</think> {{x}}")
_THINKING_TEXT = Message("assistant", "<think>\nHm.\n</think>\n\nYes.")


def _chat(*messages: Message, tools: bool = False, thinking: bool | None = None) -> Prompt:
    return Prompt(messages=(*messages, _LAST), tools=_TOOLS if tools else (), thinking=thinking)


CORPUS = {
    "several turns": _chat(_ASK, _REPLY, _MORE, _REPLY),
    "system message": _chat(_SYSTEM, _ASK, _REPLY, _MORE, _REPLY),
    "later system message": _chat(_SYSTEM, _ASK, _REPLY, _BRIEFER, _MORE, _REPLY),
    "unicode": _chat(*_UNICODE),
    "empty reply": _chat(_ASK, Message("assistant"), _MORE, _REPLY),
    "empty question": _chat(Message("user"), _REPLY, Message("user"), _REPLY),
    "consecutive questions": _chat(_ASK, _MORE, _REPLY, _ASK, _MORE, _REPLY),
    "consecutive replies": _chat(_ASK, _REPLY, _REPLY, _MORE, _REPLY),
    "markup in texts": _chat(_MARKUP, _REPLY, _MORE, _REPLY),
    "whitespace around texts": _chat(Message("user", " \n a \n"), _REPLY, Message("user", "b \n\n"), _REPLY),
    "tools, no call": _chat(_SYSTEM, _ASK, _REPLY, _MORE, _REPLY, tools=True),
    "call": _chat(_ASK, _CALL, _RESULT, _REPLY, tools=True),
    "text and call": _chat(_ASK, _TEXT_AND_CALL, _RESULT, _REPLY, tools=True),
    "call without arguments": _chat(_ASK, _CALL_WITHOUT_ARGUMENTS, _RESULT, _REPLY, tools=True),
    "call cut in its arguments": _chat(_ASK, _CUT_CALL, _RESULT, _REPLY, tools=True),
    "parallel calls": _chat(_SYSTEM, _ASK, _TWO_CALLS, *_RESULTS, _REPLY, tools=True),
    "calls in turn": _chat(_ASK, _CALL, _RESULT, _LATER_CALL, _LATER_RESULT, _REPLY, tools=True),
    "parallel calls in turn": _chat(_ASK, _CALL, _RESULT, _TWO_CALLS, *_RESULTS, _REPLY, tools=True),
    "empty result": _chat(_ASK, _CALL, replace(_RESULT, content=""), _REPLY, tools=True),
    "thinking": _chat(_ASK, _THOUGHT, _MORE, _THOUGHT, thinking=True),
    "thinking, some replies": _chat(_ASK, _REPLY, _MORE, _THOUGHT, _MORE, _REPLY),
    "thinking between calls": _chat(
        _ASK, _THOUGHT_AND_CALL, _RESULT, _THOUGHT_AND_CALL, _RESULT, _THOUGHT, tools=True
    ),
    "question after thinking between calls": _chat(
        _ASK, _THOUGHT_AND_CALL, _RESULT, _THOUGHT, _MORE, _THOUGHT_AND_CALL, _RESULT, _THOUGHT, tools=True
    ),
    "thinking refused": _chat(_ASK, _REPLY, _MORE, _REPLY, thinking=False),
    "thinking refused, calls": _chat(
        _ASK, _CALL, _RESULT, _REPLY, _MORE, _CALL, _RESULT, _REPLY, tools=True, thinking=False
    ),
    "thinking as text": _chat(_ASK, _THINKING_TEXT, _MORE, _REPLY),
}


def check_template(renderer: Renderer) -> Iterator[Finding]:
    """One finding for each conversation. Some are also played with replies that are cut short."""
    for name, prompt in CORPUS.items():
        yield check(renderer, name, prompt)
        if name in ("several turns", "call", "thinking"):
            yield check(renderer, f"{name}, cut short", prompt, cut=True)


def check(renderer: Renderer, pattern: str, prompt: Prompt, *, cut: bool = False) -> Finding:
    """Plays a conversation turn by turn. `cut`: no reply has its end-of-turn token."""
    replies = [position for position, message in enumerate(prompt.messages) if message.role == "assistant"]
    reasons: dict[Verdict, str] = {"exact": ""}
    path: list[int] = []
    depth = 0
    try:
        for end in dict.fromkeys([*replies, len(prompt.messages)]):
            request = replace(prompt, messages=prompt.messages[:end])
            whole = renderer.render_first(request)
            if depth == 0:
                path = whole
            else:
                tail = renderer.render_tail(request, depth, path)
                if tail.fork is not None:
                    reasons["forks"] = tail.fork.value
                    path = whole
                else:
                    path = [*path, *tail.ids]
                    if path != whole:
                        verdict, reason = _judge(renderer, path, tail, whole)
                        reasons[verdict] = reason
            if end < len(prompt.messages):
                path = path + _spell_reply(renderer, prompt, end, cut=cut)
                depth = end + 1
    except SessionError as error:
        return Finding(pattern=pattern, outcome="refused", reason=error.message)
    worst = min(reasons, key=_WORST_FIRST.index)
    return Finding(pattern=pattern, outcome=worst, reason=reasons[worst])


def _spell_reply(renderer: Renderer, prompt: Prompt, position: int, *, cut: bool) -> list[int]:
    """The ids of a reply, as the template writes it behind the head that its prompt ends with."""
    asked = renderer.text(replace(prompt, messages=prompt.messages[:position]))
    earlier = replace(prompt, messages=prompt.messages[: position + 1])
    answered = renderer.text(earlier, add_generation_prompt=False).removesuffix(renderer.after_reply)
    reasoning = prompt.messages[position].reasoning
    if answered.startswith(asked):
        text = answered.removeprefix(asked)
    else:
        text = _reply_behind_another_head(renderer, asked, answered)
        if asked.rstrip().endswith(THINK):
            text = f"{reasoning}{END_THINK}{text}"
    if not reasoning:
        text = text.removeprefix(f"{THINK}\n\n{END_THINK}\n\n")
    if not cut:
        text += renderer.end_of_turn
    return renderer.encode(text)


def _reply_behind_another_head(renderer: Renderer, asked: str, answered: str) -> str:
    """The text of a reply if the template writes another head for it than it asks with. In a template that is
    fit for use, the heads differ only in thinking or whitespace."""
    visible_reply = _visible_text(renderer, answered).removeprefix(_visible_text(renderer, asked))
    if not visible_reply:
        return ""
    visible_places = [place for place, letter in enumerate(answered) if not letter.isspace()]
    return answered[visible_places[-len(visible_reply)] :]


def _judge(renderer: Renderer, path: Sequence[int], tail: Tail, whole: Sequence[int]) -> tuple[Verdict, str]:
    """The verdict on a path that differs from the ids of the template's rendering, and the reason."""
    path_text = renderer.reply_text(path, special=True)
    whole_text = renderer.reply_text(whole, special=True)
    if not whole_text.endswith(renderer.reply_text(tail.ids, special=True)):
        return "wrong", "the tail is not what the template writes after the reply"
    if _visible_text(renderer, path_text) != _visible_text(renderer, whole_text):
        return "wrong", "the ids say something else than the template's rendering"
    if tail.kept_thinking:
        return "kept", f"{tail.kept_thinking} ids of thinking"
    return "kept", "whitespace, or another spelling in ids"


def _visible_text(renderer: Renderer, text: str) -> str:
    """The text without thinking, without its marks and without whitespace."""
    return renderer.without_thinking(text).replace(THINK, "").replace(END_THINK, "")


def report(findings: Sequence[Finding], parsers: tuple[str, str]) -> str:
    """A table of the findings, and what their outcomes mean. `parsers` are the names of the tool-call parser
    and of the reasoning parser."""
    tool_call_parser, reasoning_parser = parsers
    width = max(len(finding.pattern) for finding in findings)
    lines = [
        f"tool_call_parser: {tool_call_parser or 'none'}",
        f"reasoning_parser: {reasoning_parser or 'none'}",
        "",
    ]
    meanings = set()
    advice = set()
    for finding in findings:
        reason = f": {finding.reason}" if finding.reason else ""
        lines.append(f"{finding.pattern:<{width}}  {finding.outcome}{reason}")
        meanings.add(f"{finding.outcome}: {MEANING[finding.outcome]}")
        if finding.outcome == "forks":
            advice.add(f"{finding.reason}: {_FORK_ADVICE[finding.reason]}")
    return "\n".join([*lines, "", *sorted(meanings), *sorted(advice)])
