"""Tokenizers as models come with them: what is rendered in pieces has the ids of the
whole."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from running_gateway import running
from slow_cases import first_quick
from token_truth import Reference, stored_turns
from tokenizer_kinds import CHATML, KINDS, make_tokenizer_folder

from invrl.datasets.rows import Dialogue
from invrl.datasets.trajectories import trajectories
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.rendering.template_check.template_check import check_template
from invrl.gateway.types import Message, Prompt, Tool

QUICK_KIND = "space before the first word"
every_kind = pytest.mark.parametrize("name", list(KINDS))
CONVERSATION = (
    Message("user", "What is the weather?"),
    Message("assistant", "It rains. Yes,\n it does."),
    Message("user", " and  then? "),
    Message("assistant", "Some more lines"),
    Message("user", "Thank you 12."),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("kinds")
    return {
        name: make_tokenizer_folder(kind, place / str(at))
        for at, (name, kind) in enumerate(KINDS.items())
    }


def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def renderer(folder: Path) -> Renderer:
    return load_renderer(str(folder), 2**31)


def whole_ids(folder: Path, messages: tuple[Message, ...], *, head: bool) -> list[int]:
    """As transformers renders and tokenises the whole conversation."""
    tokenizer = reference(folder)
    shown = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(
        shown, add_generation_prompt=head, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@every_kind
def test_a_prompt_has_the_ids_that_transformers_gives_it(
    folders: dict[str, Path], name: str
):
    long = (Message("user", "What is the weather in Paris? " * 40), *CONVERSATION[1:])
    for messages in (CONVERSATION, long):
        expected = whole_ids(folders[name], messages, head=True)
        assert (
            renderer(folders[name]).render_first(Prompt(messages=messages)) == expected
        )


@every_kind
def test_a_conversation_in_turns_has_the_ids_of_the_whole(
    folders: dict[str, Path], name: str
):
    kind_renderer = renderer(folders[name])
    assert kind_renderer.end_of_turn_id is not None
    path = kind_renderer.render_first(Prompt(messages=CONVERSATION[:1]))
    for depth in (2, 4):
        answered = whole_ids(folders[name], CONVERSATION[:depth], head=False)
        assert answered[: len(path)] == path
        end = len(answered) - answered[::-1].index(kind_renderer.end_of_turn_id)
        path = answered[:end]
        tail = kind_renderer.render_tail(
            Prompt(messages=CONVERSATION[: depth + 1]), depth, path
        )
        assert tail.fork is None
        path = path + tail.ids
        assert path == whole_ids(folders[name], CONVERSATION[: depth + 1], head=True)


@every_kind
def test_a_trained_conversation_has_the_ids_of_the_whole(
    folders: dict[str, Path], name: str
):
    kind_renderer = renderer(folders[name])
    messages = CONVERSATION[:4]
    [branch] = trajectories(
        kind_renderer, Dialogue(prompt=Prompt(messages=messages), trained=(1, 3))
    )
    tokens = branch.tokens_T.tolist()
    whole = whole_ids(folders[name], messages, head=False)
    assert tokens == whole[: len(tokens)]
    replies = kind_renderer.decode(
        [
            token
            for token, is_trained in zip(tokens, branch.trained_T, strict=True)
            if is_trained
        ]
    )
    assert replies.count(kind_renderer.end_of_turn) == 2
    assert "weather" not in replies


@every_kind
def test_a_text_without_a_template_begins_as_the_tokenizer_begins_it(
    folders: dict[str, Path], name: str
):
    kind_renderer = renderer(folders[name])
    tokenizer = reference(folders[name])
    text = "What is the weather"
    assert (
        kind_renderer.render_text(text)
        == list(tokenizer(text)["input_ids"])[: len(kind_renderer.render_text(text))]
    )
    begin = tokenizer.bos_token if kind_renderer.render_text("") else ""
    assert kind_renderer.render_text(begin + text) == kind_renderer.render_text(text), (
        "the token is not written twice"
    )


@every_kind
def test_a_text_goes_on_without_another_beginning(folders: dict[str, Path], name: str):
    kind_renderer = renderer(folders[name])
    text = "What is the weather in Paris"
    whole = kind_renderer.render_text(text)
    path = whole[:-1]
    rest = kind_renderer.reply_text(whole[-1:], inside=True)
    assert kind_renderer.decode(
        path[len(kind_renderer.render_text("")) :]
    ) + rest == kind_renderer.decode(whole[len(kind_renderer.render_text("")) :])


@every_kind
def test_the_check_finds_every_kind_exact(folders: dict[str, Path], name: str):
    findings = list(check_template(renderer(folders[name]), Parsers()))
    wrong = {finding.pattern for finding in findings if finding.outcome == "wrong"}
    if name == "end token that takes the whitespace before it":
        # Behind what was sampled already, it cannot take what the prompt ended with.
        assert "empty reply" in wrong
        assert "several turns" not in wrong
    else:
        assert wrong == set()


def test_the_check_fails_where_the_same_text_has_other_ids(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """A tail that is tokenised alone begins with a space that the whole rendering does
    not have."""
    kind_renderer = renderer(folders["space before the first word, roles as text"])

    def alone(path, text, room):
        return kind_renderer._tokenizer.encode(text)

    monkeypatch.setattr(kind_renderer, "_encode_behind", alone)
    assert "wrong" in {
        finding.outcome for finding in check_template(kind_renderer, Parsers())
    }


def test_a_dropout_that_was_saved_with_the_tokenizer_is_off(
    tmp_path: Path, folders: dict[str, Path]
):
    without = folders["byte level"]
    folder = shutil.copytree(without, tmp_path / "model")
    description = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    description["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    prompt = Prompt(messages=CONVERSATION)
    expected = renderer(without).render_first(prompt)
    assert renderer(folder).render_first(prompt) == expected


NAMED = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": "TOOLS: {{ tools | length }}\n" + CHATML},
]


@pytest.mark.parametrize("in_files", [False, True])
def test_a_conversation_with_tools_gets_the_template_for_tools(
    tmp_path: Path, in_files: bool
):
    folder = make_tokenizer_folder(KINDS["byte level"], tmp_path / "model")
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
            NAMED[1]["template"]
        )
        (folder / "chat_template.jinja").write_text(CHATML)
    else:
        settings["chat_template"] = NAMED
    settings_file.write_text(json.dumps(settings))
    kind_renderer = renderer(folder)
    ask = CONVERSATION[:1]
    assert not kind_renderer.text(Prompt(messages=ask)).startswith("TOOLS")
    text = kind_renderer.text(Prompt(messages=ask, tools=(Tool(name="calc"),)))
    expected = reference(folder).apply_chat_template(
        [{"role": "user", "content": ask[0].content}],
        tools=[{"type": "function", "function": {"name": "calc", "parameters": {}}}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == expected


@pytest.mark.parametrize(
    "name", first_quick(sorted(KINDS, key=lambda name: name != QUICK_KIND))
)
async def test_the_gateway_records_what_the_judge_of_token_truth_expects(
    tmp_path: Path, folders: dict[str, Path], name: str
):
    kind_renderer = renderer(folders[name])
    judge = Reference(folders[name])
    reply = [*kind_renderer.encode("some more lines", inside=True), judge.end_id]
    async with running(tmp_path, folders[name], kind_renderer) as gateway:
        gateway.engine.script = lambda _: reply
        [session] = await gateway.open()
        client = gateway.client(session)
        messages: list[Any] = []
        for question in ("What is the weather?", "And then?", "Yes?"):
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(
                model="tiny", messages=messages
            )
            messages.append(
                {"role": "assistant", "content": answer.choices[0].message.content}
            )
        [texts] = await gateway.open()
        text = "What is"
        for more in (" the weather?", " And then?"):
            text += more
            completion = await gateway.client(texts).completions.create(
                model="tiny", prompt=text
            )
            text += completion.choices[0].text + judge.end
        turns = stored_turns(tmp_path / "run.db")
    chats = [turn for turn in turns if turn.session_id == session.id]
    raw = [turn for turn in turns if turn.session_id == texts.id]
    assert [turn.parent_id for turn in chats] == [None, chats[0].id, chats[1].id]
    assert chats[0].context_ids == judge.ids(judge.text(messages[:1], [], head=True))
    for depth, turn in ((2, chats[1]), (4, chats[2])):
        assert turn.context_ids == judge.tail(
            messages[: depth + 1], depth, [], closed=True
        )
    assert [turn.parent_id for turn in raw] == [None, raw[0].id]
    assert raw[0].context_ids == judge.first_ids("What is the weather?")
    assert raw[1].context_ids == judge.later_ids(" And then?", closed=True)
    assert all(later.context_ids != [] for _, later in pairwise(turns))


def test_a_saved_model_keeps_its_template_for_tools(tmp_path: Path):
    from invrl.train.weights.hf_export import copy_other_files

    source = tmp_path / "source"
    copy = tmp_path / "copy"
    (source / "additional_chat_templates").mkdir(parents=True)
    copy.mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    copy_other_files(source, copy)
    assert (
        copy / "additional_chat_templates" / "tool_use.jinja"
    ).read_text() == "tools"
