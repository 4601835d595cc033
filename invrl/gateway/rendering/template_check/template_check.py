"""`invrl check-template`: proves for a model folder that conversations continue
exactly.

Every conversation of the corpus is rendered in two ways. One is the gateway's: turn by
turn from recorded ids, with each reply spelled as the tokenizer spells the template's
own rendering of it. The other is the template's rendering of the whole conversation.
Both must give the same ids, or the gateway must have recorded why it started a new
trajectory.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from invrl.errors import SessionError
from invrl.gateway.rendering.renderer import Renderer, Tail
from invrl.gateway.rendering.replies.parser_detection import shows_tools
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.rendering.replies.reply_parser import (
    ReplyParser,
    join_deltas,
    reply_message,
)
from invrl.gateway.rendering.replies.template_reply import template_reply, visible_text
from invrl.gateway.rendering.template_check.template_corpus import CORPUS
from invrl.gateway.rendering.thinking import equal_without_thinking
from invrl.gateway.types import ADVICE, Message, Prompt, ToolChoice

Verdict = Literal["exact", "kept", "forks", "refused", "wrong"]
_PROMPT_END = 16
"""Ids at the end of a prompt that show whether it has opened thinking."""
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
    """Result of one conversation of the corpus."""

    pattern: str
    outcome: Verdict
    reason: str


def check_template(renderer: Renderer, parsers: Parsers) -> Iterator[Finding]:
    """Yield one finding for each conversation. Some are also played with replies that
    are cut short. If there is a parser of calls, a conversation is also played with
    parsed replies, whole and streamed."""
    if parsers.tool_calls:
        for stream in (False, True):
            yield check_calls(renderer, parsers, stream=stream)
    for name, prompt in CORPUS.items():
        yield check(renderer, name, prompt)
        if name in ("several turns", "call", "thinking"):
            yield check(renderer, f"{name}, cut short", prompt, cut=True)


def check(
    renderer: Renderer, pattern: str, prompt: Prompt, *, cut: bool = False
) -> Finding:
    """Play a conversation turn by turn. `cut`: no reply has its end-of-turn token."""
    return _Playback(renderer, prompt, cut=cut).finding(pattern)


def check_calls(renderer: Renderer, parsers: Parsers, *, stream: bool) -> Finding:
    """Play two turns with calls. Each reply is sent back as the parser has read it,
    with the gateway's own call ids, and ends with the token at which the engine would
    have stopped."""
    pattern = f"calls as they are parsed, {'streamed' if stream else 'whole'}"
    conversation = CORPUS["calls in turn"]
    playback = _ParsedPlayback(renderer, parsers, conversation, stream=stream)
    return playback.finding(pattern)


class _AnyPlayback(ABC):
    """A conversation that is played turn by turn, and the verdicts on its requests."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._path: list[int] = []
        """Recorded ids of the messages up to the latest reply."""
        self._reasons: dict[Verdict, str] = {"exact": ""}
        """Every verdict so far, with its latest reason."""

    @abstractmethod
    def play(self) -> None:
        """Play the conversation. Raises SessionError if the template refuses one of the
        requests."""

    def finding(self, pattern: str) -> Finding:
        """Play the conversation and return the worst verdict."""
        try:
            self.play()
        except SessionError as error:
            return Finding(pattern=pattern, outcome="refused", reason=error.message)
        worst = min(self._reasons, key=_WORST_FIRST.index)
        return Finding(pattern=pattern, outcome=worst, reason=self._reasons[worst])

    def _continue(self, tail: Tail, whole: list[int]) -> None:
        """Continue the path, and compare it with `whole`, the template's rendering of
        the request."""
        if tail.fork is not None:
            self._reasons["forks"] = tail.fork.value
            self._path = whole
            return
        self._path = self._path + tail.ids
        if self._path != whole:
            verdict, reason = _judge(self._renderer, self._path, tail, whole)
            self._reasons[verdict] = reason


class _ParsedPlayback(_AnyPlayback):
    """Plays a conversation like an agent that sends back what it received."""

    def __init__(
        self,
        renderer: Renderer,
        parsers: Parsers,
        conversation: Prompt,
        *,
        stream: bool,
    ) -> None:
        super().__init__(renderer)
        self._parsers = parsers
        self._conversation = conversation
        self._stream = stream
        self._request = Prompt(messages=())
        self._call_id = ""
        """Id of the call whose result comes next."""

    def play(self) -> None:
        self._request = replace(self._conversation, messages=())
        for message in self._conversation.messages:
            if message.role == "assistant":
                self._ask()
                self._reply(message)
            elif message.role == "tool":
                self._send(replace(message, tool_call_id=self._call_id))
            else:
                self._send(message)
        self._ask()

    def _send(self, message: Message) -> None:
        self._request = replace(
            self._request, messages=(*self._request.messages, message)
        )

    def _ask(self) -> None:
        whole = self._renderer.render_first(self._request)
        if not self._path:
            self._path = whole
            return
        tail = self._tail()
        if tail.fork is None and self._renderer.end_of_turn_id is None:
            # The reply ended with the mark of the next message, if the engine stops at
            # it.
            self._path += [
                token_id
                for token_id in tail.ids[:1]
                if token_id in self._renderer.end_ids
            ]
            tail = self._tail()
        self._continue(tail, whole)

    def _tail(self) -> Tail:
        replies = [
            at
            for at, message in enumerate(self._request.messages, 1)
            if message.role == "assistant"
        ]
        return self._renderer.render_tail(self._request, replies[-1], self._path)

    def _reply(self, message: Message) -> None:
        """Sample the message, and record it as the client gets it."""
        position = len(self._request.messages)
        answered = replace(self._request, messages=(*self._request.messages, message))
        sampled = template_reply(self._renderer, answered, position)
        parser = self._parsers.reply(
            self._request.tools,
            ToolChoice(),
            parallel=True,
            prompt_text=self._renderer.reply_text(
                self._path[-_PROMPT_END:], special=True
            ),
            stream=self._stream,
            turn_id=f"turn-{position}",
        )
        reply = _read(self._renderer, parser, sampled)
        if not _same_reply(reply, message):
            said = self._renderer.reply_text(sampled, special=True)
            self._reasons["wrong"] = (
                f"the parser {self._parsers.tool_calls} reads {said!r} as"
                f" {len(reply.tool_calls)} calls and the text {reply.content!r}"
            )
        if reply.tool_calls:
            self._call_id = reply.tool_calls[0].id
        self._path = self._path + sampled
        self._send(reply)


def _read(renderer: Renderer, parser: ReplyParser, sampled: Sequence[int]) -> Message:
    """Return the message that a client gets for the sampled ids, which arrive one by
    one."""
    text = renderer.stream((), special=parser.special)
    deltas = [parser.push(text.push([token_id])) for token_id in sampled]
    deltas.append(parser.push(text.finish()))
    return reply_message(join_deltas([*deltas, *parser.finish()]))


def _same_reply(reply: Message, expected: Message) -> bool:
    if reply.content.strip() != expected.content or len(reply.tool_calls) != len(
        expected.tool_calls
    ):
        return False
    for call, written in zip(reply.tool_calls, expected.tool_calls, strict=True):
        try:
            same_arguments = json.loads(call.arguments) == json.loads(written.arguments)
        except ValueError:
            return False
        if call.name != written.name or not same_arguments:
            return False
    return True


class _Playback(_AnyPlayback):
    """Plays one conversation like the gateway: each reply is sampled after the path of
    recorded ids."""

    def __init__(self, renderer: Renderer, prompt: Prompt, *, cut: bool) -> None:
        super().__init__(renderer)
        self._prompt = prompt
        self._cut = cut
        self._depth = 0
        """Number of messages that the path stands for."""

    def play(self) -> None:
        for position, message in enumerate(self._prompt.messages):
            if message.role == "assistant":
                self._request(position)
                self._reply(position)
        self._request(len(self._prompt.messages))

    def _request(self, num_messages: int) -> None:
        """Request the reply to the first messages, and compare the prompt's ids with
        the template's."""
        messages = self._prompt.messages[:num_messages]
        request = replace(self._prompt, messages=messages)
        whole = self._renderer.render_first(request)
        if self._depth == 0:
            self._path = whole
            return
        tail = self._renderer.render_tail(request, self._depth, self._path)
        self._continue(tail, whole)

    def _reply(self, position: int) -> None:
        """Record the message at `position` as the sampled reply."""
        reply_ids = template_reply(
            self._renderer, self._prompt, position, cut=self._cut
        )
        self._path = self._path + reply_ids
        self._depth = position + 1


def _judge(
    renderer: Renderer,
    path: Sequence[int],
    tail: Tail,
    whole: Sequence[int],
) -> tuple[Verdict, str]:
    """Return the verdict on a path that differs from the ids of the template's
    rendering, and the reason. Only thinking, and the whitespace around it, may
    differ."""
    path_text = renderer.decode(path)
    whole_text = renderer.decode(whole)
    tail_text = renderer.decode(tail.ids, inside=True)
    if not whole_text.endswith(tail_text):
        return "wrong", "the tail is not what the template writes after the reply"
    if path_text == whole_text:
        return "wrong", "the same text has other ids in the template's rendering"
    if visible_text(renderer, path_text) != visible_text(renderer, whole_text):
        return "wrong", "the ids say something else than the template's rendering"
    if tail.kept_thinking:
        return "kept", f"{tail.kept_thinking} ids of thinking"
    if not _differ_in_thinking(renderer, path_text, whole_text):
        return "wrong", "the template's rendering has other whitespace"
    return "kept", "an empty thought, or whitespace around one"


def _differ_in_thinking(renderer: Renderer, path_text: str, whole_text: str) -> bool:
    """Whether one of the texts is the other one without some of its thinking."""
    end_of_turn = renderer.end_of_turn
    return equal_without_thinking(
        whole_text, path_text, end_of_turn
    ) or equal_without_thinking(path_text, whole_text, end_of_turn)


def missing_tools(renderer: Renderer, parsers: Parsers) -> str:
    """Say what the template lacks for conversations with tools, and the remedy; "" if
    it lacks nothing."""
    if not shows_tools(renderer):
        return (
            "The template shows no tools: the model does not learn of those that a request offers, and the"
            " request is refused. Give a template with tools: --chat-template-path FILE (chatml-tools is"
            " shipped, for models that speak ChatML)."
        )
    if not parsers.tool_calls:
        return (
            "No parser reads the calls that the template writes: requests with tools are refused. Name a"
            " parser of SGLang's (--tool-call-parser NAME), or give another template (--chat-template-path"
            " FILE)."
        )
    return ""


def report(findings: Sequence[Finding], parsers: Parsers, missing: str = "") -> str:
    """Format a table of the findings, and the meaning of their outcomes. `missing` is
    what the template lacks, which comes first."""
    width = max(len(finding.pattern) for finding in findings)
    lines = [missing, ""] if missing else []
    lines += [
        f"tool_call_parser: {parsers.tool_calls or 'none'}",
        f"reasoning_parser: {parsers.reasoning or 'none'}",
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
