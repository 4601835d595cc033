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
from invrl.gateway.rendering.template_corpus import CORPUS
from invrl.gateway.rendering.thinking import END_THINK, THINK, equal_without_thinking
from invrl.gateway.types import ADVICE, Prompt

Verdict = Literal["exact", "kept", "forks", "refused", "wrong"]
_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "forks", "kept", "exact")
MEANING = {
    "exact": "the ids are those of the template's own rendering",
    "kept": "goes on from what was sampled, where the template would now show other thinking",
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


def check_template(renderer: Renderer) -> Iterator[Finding]:
    """One finding for each conversation. Some are also played with replies that are cut short."""
    for name, prompt in CORPUS.items():
        yield check(renderer, name, prompt)
        if name in ("several turns", "call", "thinking"):
            yield check(renderer, f"{name}, cut short", prompt, cut=True)


def check(renderer: Renderer, pattern: str, prompt: Prompt, *, cut: bool = False) -> Finding:
    """Plays a conversation turn by turn. `cut`: no reply has its end-of-turn token."""
    playback = _Playback(renderer, prompt, cut=cut)
    try:
        playback.play()
    except SessionError as error:
        return Finding(pattern=pattern, outcome="refused", reason=error.message)
    worst = min(playback.reasons, key=_WORST_FIRST.index)
    return Finding(pattern=pattern, outcome=worst, reason=playback.reasons[worst])


class _Playback:
    """Plays one conversation as the gateway would: each reply is sampled behind the path of recorded ids."""

    def __init__(self, renderer: Renderer, prompt: Prompt, *, cut: bool) -> None:
        self._renderer = renderer
        self._prompt = prompt
        self._cut = cut
        self._path: list[int] = []
        """The recorded ids of the first `_depth` messages."""
        self._depth = 0
        self.reasons: dict[Verdict, str] = {"exact": ""}
        """Every verdict on a request so far, with its latest reason."""

    def play(self) -> None:
        """SessionError if the template refuses one of the requests."""
        for position, message in enumerate(self._prompt.messages):
            if message.role == "assistant":
                self._request(position)
                self._reply(position)
        self._request(len(self._prompt.messages))

    def _request(self, num_messages: int) -> None:
        """Asks for the reply to the first messages, and compares the prompt's ids with the template's."""
        messages = self._prompt.messages[:num_messages]
        request = replace(self._prompt, messages=messages)
        whole = self._renderer.render_first(request)
        if self._depth == 0:
            self._path = whole
            return
        tail = self._renderer.render_tail(request, self._depth, self._path)
        if tail.fork is not None:
            self.reasons["forks"] = tail.fork.value
            self._path = whole
            return
        self._path = self._path + tail.ids
        if self._path != whole:
            verdict, reason = _judge(self._renderer, self._path, tail, whole)
            self.reasons[verdict] = reason

    def _reply(self, position: int) -> None:
        """Records the message at `position` as the reply that was sampled."""
        reply_ids = _spell_reply(self._renderer, self._prompt, position, cut=self._cut)
        self._path = self._path + reply_ids
        self._depth = position + 1


def _spell_reply(renderer: Renderer, prompt: Prompt, position: int, *, cut: bool) -> list[int]:
    """The ids of a reply, as the template writes it behind the head that its prompt ends with."""
    request = replace(prompt, messages=prompt.messages[:position])
    conversation = replace(prompt, messages=prompt.messages[: position + 1])
    asked = renderer.text(request)
    answered = renderer.text(conversation, add_generation_prompt=False)
    answered = answered.removesuffix(renderer.after_reply)
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
    return renderer.encode_after(asked, text)


def _reply_behind_another_head(renderer: Renderer, asked: str, answered: str) -> str:
    """The text of a reply if the template writes another head for it than it asks with. In a template that is
    fit for use, the heads differ only in thinking or whitespace."""
    visible_prompt = _visible_text(renderer, asked)
    visible_reply = _visible_text(renderer, answered).removeprefix(visible_prompt)
    if not visible_reply:
        return ""
    visible_places = [place for place, letter in enumerate(answered) if not letter.isspace()]
    begin = visible_places[-len(visible_reply)]
    return answered[begin:]


def _judge(
    renderer: Renderer,
    path: Sequence[int],
    tail: Tail,
    whole: Sequence[int],
) -> tuple[Verdict, str]:
    """The verdict on a path that differs from the ids of the template's rendering, and the reason. Only
    thinking, and the whitespace around it, may be what differs."""
    path_text = renderer.decode(path)
    whole_text = renderer.decode(whole)
    tail_text = renderer.decode(tail.ids, inside=True)
    if not whole_text.endswith(tail_text):
        return "wrong", "the tail is not what the template writes after the reply"
    if path_text == whole_text:
        return "wrong", "the same text has other ids in the template's rendering"
    if _visible_text(renderer, path_text) != _visible_text(renderer, whole_text):
        return "wrong", "the ids say something else than the template's rendering"
    if tail.kept_thinking:
        return "kept", f"{tail.kept_thinking} ids of thinking"
    if not _differ_in_thinking(renderer, path_text, whole_text):
        return "wrong", "the template's rendering has other whitespace"
    return "kept", "an empty thought, or whitespace around one"


def _differ_in_thinking(renderer: Renderer, path_text: str, whole_text: str) -> bool:
    """Whether one of the texts is the other one without some of its thinking."""
    end_of_turn = renderer.end_of_turn
    return equal_without_thinking(whole_text, path_text, end_of_turn) or equal_without_thinking(
        path_text, whole_text, end_of_turn
    )


def _visible_text(renderer: Renderer, text: str) -> str:
    """The text without thinking, without its marks and without whitespace."""
    text = renderer.without_thinking(text)
    for mark in (THINK, END_THINK):
        text = text.replace(mark, "")
    return text


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
        line = f"{finding.pattern:<{width}}  {finding.outcome}"
        if finding.reason:
            line += f": {finding.reason}"
        lines.append(line)
        meanings.add(f"{finding.outcome}: {MEANING[finding.outcome]}")
        if finding.outcome == "forks":
            advice.add(f"{finding.reason}: {_FORK_ADVICE[finding.reason]}")
    return "\n".join([*lines, "", *sorted(meanings), *sorted(advice)])
