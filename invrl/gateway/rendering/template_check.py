"""`invrl check-template`: proves for a model folder that conversations go on exactly.

Every pattern of the corpus is rendered twice: as the gateway does, turn by turn from recorded ids, with
replies spelled as the tokenizer spells the template's own rendering of them; and as a whole. Both must be
the same ids, or the gateway must have recorded why it started anew."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from invrl.errors import SessionError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import ADVICE, Message, Prompt, Tool, ToolCall

Verdict = Literal["exact", "kept", "forks", "refused", "wrong"]
_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "forks", "kept", "exact")
MEANING = {
    "exact": "the ids are those of the template's own rendering",
    "kept": "goes on from what was sampled, where the template would now show other thinking or whitespace",
    "forks": "a turn begins a branch of its own, rendered anew",
    "refused": "the template does not take such conversations: the agent gets a 400",
    "wrong": "neither exact nor a recorded fork: report it, and do not train on such conversations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    pattern: str
    outcome: Verdict
    reason: str


_FORKS = {fork.value: text for fork, text in ADVICE.items()} | {
    "template_changed": "the template writes such a reply otherwise than it asks for it, or without an end of"
    " turn; another template can be given: --chat-template-path"
}
_CITY = "Ürümqi"


def _call(nth: int, arguments: str = f'{{"city": "{_CITY}", "days": [1, 2]}}') -> ToolCall:
    return ToolCall(f"callid{nth:03}", "get_weather", arguments)


_SYSTEM, _ASK, _MORE = Message("system", "Be brief."), Message("user", "Hello?"), Message("user", "And then?")
_REPLY, _LAST = Message("assistant", "Yes, of course."), Message("user", "Thank you.")
_PARAMETERS = '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}'
_TOOLS = (Tool(name="get_weather", description="The weather.", parameters=_PARAMETERS), Tool(name="halt"))
_ONE, _TWO = (Message("assistant", tool_calls=calls) for calls in ((_call(1),), (_call(1), _call(2))))
_RESULTS = tuple(Message("tool", f'{{"sky": "{nth}"}}', tool_call_id=f"callid{nth:03}") for nth in range(4))
_AGAIN = Message("assistant", tool_calls=(_call(3),))
_EMPTY, _CUT = (
    Message("assistant", tool_calls=(_call(1, arguments),)) for arguments in ("{}", '{"city": "Ür')
)
_THOUGHT = replace(_REPLY, reasoning="Let me see.\n\nIt is so.")
_MIDWAY = replace(_ONE, reasoning="I need the weather.")
_TEXTS = "漢字 und Ünïcödé 🙂\u200d🔥", "zero\u00a0width\u200b", "\ttabs\n\n\nand  spaces", "كيف الحال؟"


def _chat(*messages: Message, tools: bool = False, thinking: bool | None = None) -> Prompt:
    return Prompt(messages=(*messages, _LAST), tools=_TOOLS if tools else (), thinking=thinking)


CORPUS = {
    "several turns": _chat(_ASK, _REPLY, _MORE, _REPLY),
    "system message": _chat(_SYSTEM, _ASK, _REPLY, _MORE, _REPLY),
    "later system message": _chat(_SYSTEM, _ASK, _REPLY, Message("system", "Be briefer."), _MORE, _REPLY),
    "unicode": _chat(*(Message(("user", "assistant")[at % 2], text) for at, text in enumerate(_TEXTS))),
    "empty reply": _chat(_ASK, Message("assistant"), _MORE, _REPLY),
    "empty question": _chat(Message("user"), _REPLY, Message("user"), _REPLY),
    "consecutive questions": _chat(_ASK, _MORE, _REPLY, _ASK, _MORE, _REPLY),
    "consecutive replies": _chat(_ASK, _REPLY, _REPLY, _MORE, _REPLY),
    "markup in texts": _chat(Message("user", "<think>a</think> {{x}}"), _REPLY, _MORE, _REPLY),
    "whitespace around texts": _chat(Message("user", " \n a \n"), _REPLY, Message("user", "b \n\n"), _REPLY),
    "tools, no call": _chat(_SYSTEM, _ASK, _REPLY, _MORE, _REPLY, tools=True),
    "call": _chat(_ASK, _ONE, _RESULTS[1], _REPLY, tools=True),
    "text and call": _chat(_ASK, replace(_ONE, content="I look."), _RESULTS[1], _REPLY, tools=True),
    "call without arguments": _chat(_ASK, _EMPTY, _RESULTS[1], _REPLY, tools=True),
    "call cut in its arguments": _chat(_ASK, _CUT, _RESULTS[1], _REPLY, tools=True),
    "parallel calls": _chat(_SYSTEM, _ASK, _TWO, *_RESULTS[1:3], _REPLY, tools=True),
    "calls in turn": _chat(_ASK, _ONE, _RESULTS[1], _AGAIN, _RESULTS[3], _REPLY, tools=True),
    "parallel calls in turn": _chat(_ASK, _ONE, _RESULTS[1], _TWO, *_RESULTS[1:3], _REPLY, tools=True),
    "empty result": _chat(_ASK, _ONE, replace(_RESULTS[1], content=""), _REPLY, tools=True),
    "thinking": _chat(_ASK, _THOUGHT, _MORE, _THOUGHT, thinking=True),
    "thinking, some replies": _chat(_ASK, _REPLY, _MORE, _THOUGHT, _MORE, _REPLY),
    "thinking between calls": _chat(_ASK, _MIDWAY, _RESULTS[1], _MIDWAY, _RESULTS[1], _THOUGHT, tools=True),
    "question after thinking between calls": _chat(
        _ASK, _MIDWAY, _RESULTS[1], _THOUGHT, _MORE, _MIDWAY, _RESULTS[1], _THOUGHT, tools=True
    ),
    "thinking refused": _chat(_ASK, _REPLY, _MORE, _REPLY, thinking=False),
    "thinking refused, calls": _chat(
        _ASK, _ONE, _RESULTS[1], _REPLY, _MORE, _ONE, _RESULTS[1], _REPLY, tools=True, thinking=False
    ),
    "thinking as text": _chat(_ASK, Message("assistant", "<think>\nHm.\n</think>\n\nYes."), _MORE, _REPLY),
}


def check_template(renderer: Renderer) -> Iterator[Finding]:
    """One finding per pattern, each once with replies that end their turn and once cut short."""
    for name, prompt in CORPUS.items():
        yield check(renderer, name, prompt)
        if name in ("several turns", "call", "thinking"):
            yield check(renderer, f"{name}, cut short", prompt, cut=True)


def check(renderer: Renderer, pattern: str, prompt: Prompt, *, cut: bool = False) -> Finding:
    """Plays the conversation turn by turn. `cut`: no reply has its end-of-turn token."""
    ends = [at for at, message in enumerate(prompt.messages) if message.role == "assistant"]
    path, depth = list[int](), 0
    found: dict[Verdict, str] = {"exact": ""}
    try:
        for end in dict.fromkeys([*ends, len(prompt.messages)]):
            request = replace(prompt, messages=prompt.messages[:end])
            own = renderer.render_first(request)
            if depth:
                tail = renderer.render_tail(request, depth, path)
                path = own if tail.fork else [*path, *tail.ids]
                if tail.fork:
                    found["forks"] = tail.fork.value
                elif path != own:
                    outcome, reason = _judge(renderer, path, tail.ids, own, tail.kept_thinking)
                    found[outcome] = reason
            else:
                path = own
            if end < len(prompt.messages):
                path, depth = path + _spelled(renderer, prompt, end, cut=cut), end + 1
    except SessionError as error:
        return Finding(pattern=pattern, outcome="refused", reason=error.message)
    outcome = min(found, key=_WORST_FIRST.index)
    return Finding(pattern=pattern, outcome=outcome, reason=found[outcome])


def _spelled(renderer: Renderer, prompt: Prompt, at: int, *, cut: bool) -> list[int]:
    """The ids of reply `at`, as the template writes it behind the head that its prompt ends with."""
    asked = renderer.text(replace(prompt, messages=prompt.messages[:at]))
    earlier = replace(prompt, messages=prompt.messages[: at + 1])
    answered = renderer.text(earlier, add_generation_prompt=False).removesuffix(renderer.after_reply)
    text, thought = answered.removeprefix(asked), prompt.messages[at].reasoning
    if text == answered:  # the heads differ, in thinking or whitespace if the template is fit for use
        rest = len(_plain(renderer, answered).removeprefix(_plain(renderer, asked)))
        places = [place for place, letter in enumerate(answered) if not letter.isspace()]
        text = answered[places[-rest] :] if rest else ""
        text = f"{thought}</think>{text}" if asked.rstrip().endswith("<think>") else text
    if not thought:
        text = text.removeprefix("<think>\n\n</think>\n\n")
    return renderer.encode(text if cut else text + renderer.end_of_turn)


def _judge(
    renderer: Renderer, path: Sequence[int], tail: Sequence[int], own: Sequence[int], kept: int
) -> tuple[Verdict, str]:
    """Of ids that go on otherwise than the template's whole rendering `own`."""
    shown, whole = (renderer.reply_text([*ids, -1][:-1], special=True) for ids in (path, own))
    if not whole.endswith(renderer.reply_text(tail, special=True)):
        return "wrong", "the tail is not what the template writes after the reply"
    if _plain(renderer, shown) != _plain(renderer, whole):
        return "wrong", "the ids say something else than the template's rendering"
    return "kept", f"{kept} ids of thinking" if kept else "whitespace, or another spelling in ids"


def _plain(renderer: Renderer, text: str) -> str:
    return renderer.without_thinking(text).replace("<think>", "").replace("</think>", "")


def report(findings: Sequence[Finding], parsers: tuple[str, str]) -> str:
    """A table, then what its outcomes mean. `parsers`: of tool calls and of reasoning."""
    width = max(len(each.pattern) for each in findings)
    lines = [f"tool_call_parser: {parsers[0] or 'none'}", f"reasoning_parser: {parsers[1] or 'none'}", ""]
    for each in findings:
        why = f": {each.reason}" if each.reason else ""
        lines.append(f"{each.pattern:<{width}}  {each.outcome}{why}")
    notes = {f"{each.outcome}: {MEANING[each.outcome]}" for each in findings}
    advice = {f"{each.reason}: {_FORKS[each.reason]}" for each in findings if each.outcome == "forks"}
    return "\n".join([*lines, "", *sorted(notes), *sorted(advice)])
