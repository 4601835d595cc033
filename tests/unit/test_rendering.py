"""Messages to ids and ids to text: exact ids are kept, text is never re-tokenised."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import make_tiny_model

from invrl.errors import SessionError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.thinking import equal_without_thinking, find_thoughts
from invrl.gateway.types import ForkReason, Message, Prompt

END = 2
ASK = Message("user", "What is 12*13?")
MORE = Message("user", "and Ünïcödé 漢字 🙂?")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return load_renderer(str(folder), 512)


def with_template(
    renderer: Renderer, template, *, keep_thinking: bool = False
) -> Renderer:
    def shown(prompt: Prompt, *, add_generation_prompt: bool) -> str:
        return template(prompt.messages, add_generation_prompt)

    return Renderer(
        shown,
        renderer._tokenizer,
        end_ids=frozenset({END}),
        vocab_size=512,
        keep_thinking=keep_thinking,
    )


def chat(*messages: Message) -> Prompt:
    return Prompt(messages=messages)


def chatml(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" * add_generation_prompt


def test_end_of_turn_is_read_from_the_template(renderer: Renderer):
    assert renderer.end_of_turn == "<|im_end|>"
    assert renderer.end_of_turn_id == END
    assert renderer.end_ids == {END}


def test_a_first_turn_is_the_whole_rendering(renderer: Renderer):
    ids = renderer.render_first(chat(ASK, MORE))
    assert ids == renderer._tokenizer.encode(chatml([ASK, MORE], True))


def test_closed_turn_is_continued_after_its_end_token(renderer: Renderer):
    reply = Message("assistant", "calc(12*13)")
    tail = renderer.render_tail(chat(ASK, reply, MORE), 2, [END])
    assert tail.fork is None
    assert tail.ids == renderer._tokenizer.encode("\n" + chatml([MORE], True))


def test_a_turn_that_ran_out_of_tokens_gets_its_end_token_as_context(
    renderer: Renderer,
):
    tail = renderer.render_tail(
        chat(ASK, Message("assistant", "calc(12"), MORE), 2, [9]
    )
    assert tail.ids == renderer._tokenizer.encode("<|im_end|>\n" + chatml([MORE], True))
    assert tail.ids[0] == END


texts = st.text(
    st.characters(exclude_characters="<|>", exclude_categories=["Cs"]), max_size=20
)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, min_size=3, max_size=7))
def test_path_and_tail_equal_the_rendering_of_the_template(
    renderer: Renderer, contents: list[str]
):
    """Where the reply was spelled as the tokenizer spells it, incremental equals full
    rendering."""
    messages = [
        Message("assistant" if at % 2 else "user", text)
        for at, text in enumerate(contents)
    ]
    depth = 2 * ((len(messages) - 1) // 2)
    if depth == len(messages):
        depth -= 2
    head = renderer.render_first(chat(*messages[: depth - 1]))
    sampled = [*renderer._tokenizer.encode(messages[depth - 1].content), END]
    tail = renderer.render_tail(chat(*messages), depth, head + sampled)
    assert head + sampled + tail.ids == renderer._tokenizer.encode(
        chatml(messages, True)
    )


def test_stripped_thinking_and_a_changed_template_fork(renderer: Renderer):
    def strips(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        last = max((at for at, m in enumerate(messages) if m.role == "user"), default=0)
        kept = [
            Message(m.role, m.content.split("</think>")[-1]) if at < last else m
            for at, m in enumerate(messages)
        ]
        return chatml(kept, add_generation_prompt)

    def counts(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return f"{len(messages)} messages" + chatml(messages, add_generation_prompt)

    thought = Message("assistant", "<think>hm</think>4")
    path = [3, 9, 4, 9, END]
    stripped = with_template(renderer, strips).render_tail(
        chat(ASK, thought, MORE), 2, path
    )
    assert stripped.fork is ForkReason.THINKING_STRIPPED
    plain = chat(ASK, Message("assistant", "4"), MORE)
    assert with_template(renderer, strips).render_tail(plain, 2, [END]).ids
    kept = with_template(renderer, strips, keep_thinking=True).render_tail(
        chat(ASK, thought, MORE), 2, path
    )
    assert kept.ids == renderer._tokenizer.encode("\n" + chatml([MORE], True))
    assert kept.kept_thinking == 3
    changed = with_template(renderer, counts).render_tail(plain, 2, [END])
    assert changed.fork is ForkReason.TEMPLATE_CHANGED


def test_a_history_that_the_template_shows_otherwise_is_not_continued(
    renderer: Renderer,
):
    def shortens(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        last = max(
            (position for position, m in enumerate(messages) if m.role == "user"),
            default=0,
        )
        shown = [
            Message("user", "...") if m.role == "user" and position < last else m
            for position, m in enumerate(messages)
        ]
        return chatml(shown, add_generation_prompt)

    conversation = chat(ASK, Message("assistant", "4"), MORE)
    tail = with_template(renderer, shortens).render_tail(conversation, 2, [9, END])
    assert tail.fork is ForkReason.TEMPLATE_CHANGED


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<|im_end|>", "x", "\n"]), max_size=12
    ).map("".join)
)
def test_positions_of_thoughts_equal_those_of_a_regular_expression(
    renderer: Renderer, text: str
):
    thought = re.compile(r"<think>(?:(?!<\|im_end\|>).)*?</think>", re.DOTALL)
    expected = {match.start(): match.end() for match in thought.finditer(text)}
    assert find_thoughts(text, renderer.end_of_turn) == expected
    endless = with_template(
        renderer, lambda messages, add: "".join(m.content for m in messages)
    )
    assert endless.end_of_turn == ""
    thought = re.compile(r"<think>(?:(?!<think>).)*?</think>", re.DOTALL)
    assert find_thoughts(text, "") == {
        match.start(): match.end() for match in thought.finditer(text)
    }


def test_long_history_of_thoughts_is_compared_in_linear_time(renderer: Renderer):
    """By a regular expression each of these took minutes or longer."""
    equal = partial(equal_without_thinking, end_of_turn=renderer.end_of_turn)
    thoughts = partial(find_thoughts, end_of_turn=renderer.end_of_turn)
    thought = "<think>y</think> x "
    assert equal("a " + "x " * 200 + "b", "a " + thought * 200 + "b")
    assert not equal("a " + "x " * 200 + "c", "a " + thought * 200 + "b")
    assert not equal("a " + thought * 200 + "c", "a " + thought * 200 + "b")
    assert thoughts("<think>" * 200_000) == {}
    assert thoughts("</think>" * 200_000) == {}
    assert thoughts("<think><|im_end|>" * 100_000 + "</think>") == {}
    assert not equal("\n\na", "a")
    assert equal("a\nb", "a\n<think>\n\n</think>\n\nb")


def test_template_without_an_end_token_keeps_its_text_after_a_reply(renderer: Renderer):
    def plain(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return (
            "".join(f"{m.role}: {m.content}\n\n" for m in messages)
            + "assistant: " * add_generation_prompt
        )

    plain_renderer = with_template(renderer, plain)
    assert plain_renderer.end_of_turn_id is None
    tail = plain_renderer.render_tail(
        chat(ASK, Message("assistant", "4"), MORE), 2, [9]
    )
    assert tail.ids == renderer._tokenizer.encode(
        f"\n\nuser: {MORE.content}\n\nassistant: "
    )


def test_messages_that_the_template_refuses_are_a_400(renderer: Renderer):
    def refuses(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if messages[-1].content == "no":
            raise ValueError("roles must alternate")
        return chatml(messages, add_generation_prompt)

    with pytest.raises(SessionError, match="roles must alternate") as caught:
        with_template(renderer, refuses).render_first(chat(Message("user", "no")))
    assert caught.value.status == 400


def test_ids_outside_of_the_vocabulary_never_reach_an_engine(renderer: Renderer):
    ids = renderer.render_first(chat(ASK))
    with_vocabulary = partial(
        Renderer,
        renderer._template,
        renderer._tokenizer,
        end_ids=frozenset({END}),
        keep_thinking=False,
    )
    assert with_vocabulary(vocab_size=max(ids) + 1).render_first(chat(ASK)) == ids
    with pytest.raises(SessionError, match="vocabulary"):
        with_vocabulary(vocab_size=max(ids)).render_first(chat(ASK))


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(3, 511), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_streamed_text_joins_to_the_whole_text(
    renderer: Renderer, ids: list[int], cuts: list[int]
):
    """Any ids (also ones that spell half a character), in chunks of any size."""
    stream = renderer.stream(())
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    pieces.append(stream.finish())
    assert "".join(pieces) == renderer.reply_text(ids)


def test_characters_are_never_split(renderer: Renderer):
    ids = renderer._tokenizer.encode("漢字🙂")
    assert len(ids) > 3
    stream = renderer.stream(())
    pieces = [stream.push([token]) for token in [*ids, END]] + [stream.finish()]
    assert "".join(pieces) == "漢字🙂"
    assert all("�" not in piece for piece in pieces)


def test_no_part_of_a_stop_string_is_shown(renderer: Renderer):
    stream = renderer.stream(("STOP", "\n\n"))
    ids = renderer._tokenizer.encode("one STO two ST\nOP STOP three")
    pieces = [stream.push([token]) for token in ids] + [stream.finish()]
    assert "".join(pieces) == "one STO two ST\nOP "
    assert all("STOP"[: len(p)] != p for p in pieces[-3:] if p)


def test_loading_a_folder_without_a_template_names_it(tmp_path: Path):
    from invrl.errors import ConfigError

    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    import json

    values = json.loads(config.read_text())
    values.pop("chat_template", None)
    config.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="chat template"):
        load_renderer(str(folder), 512)
