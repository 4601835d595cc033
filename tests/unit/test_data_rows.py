"""Rows of data files: what is trained of them, and what is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from invrl.datasets.config import Kind
from invrl.datasets.rows import DataRow, load_rows, read_row
from invrl.errors import ConfigError, UnusableRowError
from invrl.gateway.types import Message, ToolCall

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
MORE = {"role": "user", "content": "and 3+3?"}
SIX = {"role": "assistant", "content": "6"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {}},
    },
}


def row(kind: Kind = "conversations", **fields: Any) -> DataRow:
    return read_row(1, fields, kind)


def trained(read: DataRow) -> list[list[str]]:
    """The trained texts of each side."""
    return [
        [side.prompt.messages[at].content for at in side.trained] for side in read.sides
    ]


def test_every_reply_of_a_conversation_is_trained() -> None:
    assert trained(row(messages=[USER, FOUR, MORE, SIX])) == [["4", "6"]]


def test_reply_of_weight_0_is_context() -> None:
    assert trained(
        row(
            messages=[
                USER,
                {**FOUR, "weight": 0},
                MORE,
                {**SIX, "weight": 1},
            ]
        )
    ) == [["6"]]


def test_a_completion_is_trained_and_its_prompt_is_context() -> None:
    assert trained(row(prompt="2+2?", completion="4")) == [["4"]]
    read = row(prompt=[USER, FIVE, MORE], completion=[SIX])
    assert trained(read) == [["6"]]
    assert [message.role for message in read.sides[0].prompt.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_calls_and_tools_of_a_row_are_read_like_in_the_gateway() -> None:
    as_object = {
        **CALL,
        "function": {"name": "add", "arguments": {"a": 2}},
    }
    result = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    replies = []
    for call in (CALL, as_object):
        asks = {"role": "assistant", "content": None, "tool_calls": [call]}
        read = row(messages=[USER, asks, result, FOUR], tools=[TOOL])
        [side] = read.sides
        assert side.trained == (1, 3)
        assert [tool.name for tool in side.prompt.tools] == ["add"]
        replies.append(side.prompt.messages[1])
    assert replies[0] == Message(
        "assistant", tool_calls=(ToolCall("c1", "add", '{"a": 2}'),)
    )
    assert replies[1] == replies[0]
    as_text = row(messages=[USER, FOUR], tools=json.dumps([TOOL]))
    assert [tool.name for tool in as_text.sides[0].prompt.tools] == ["add"]


def test_row_turns_thinking_on_or_off() -> None:
    read = row(messages=[USER, FOUR], chat_template_kwargs={"enable_thinking": False})
    assert read.sides[0].prompt.thinking is False
    assert row(messages=[USER, FOUR]).sides[0].prompt.thinking is None


def test_pair_trains_only_the_differing_replies() -> None:
    expected = [["4"], ["5"]]
    assert trained(row("pairs", prompt="2+2?", chosen="4", rejected="5")) == expected
    assert (
        trained(row("pairs", prompt=[USER], chosen=[FOUR], rejected=[FIVE])) == expected
    )
    assert trained(row("pairs", chosen=[USER, FOUR], rejected=[USER, FIVE])) == expected
    longer = row(
        "pairs", chosen=[USER, FOUR, MORE, SIX], rejected=[USER, FOUR, MORE, FIVE]
    )
    assert trained(longer) == [["6"], ["5"]], (
        "the reply that both sides have is context"
    )


def test_labelled_reply_is_read_with_its_label() -> None:
    good = row("labels", messages=[USER, FOUR], label=True)
    bad = row("labels", prompt="2+2?", completion="5", label=False)
    assert trained(good) == [["4"]]
    assert good.label is True
    assert trained(bad) == [["5"]]
    assert bad.label is False


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("conversations", {"messages": [USER]}, "no message is the assistant's"),
        (
            "conversations",
            {"messages": "2+2? 4"},
            "`messages` is text, not a list of messages",
        ),
        ("conversations", {"messages": []}, "`messages` is an empty list"),
        (
            "conversations",
            {"messages": ["hello"]},
            "messages[0] is 'hello', not a message",
        ),
        (
            "conversations",
            {"messages": [{"role": "bot", "content": "x"}]},
            "'bot' is not one",
        ),
        (
            "conversations",
            {"messages": [{"content": "x"}]},
            "missing required field `role`",
        ),
        (
            "conversations",
            {"messages": [{"role": "user"}, FOUR]},
            "messages[0].content must be text",
        ),
        (
            "conversations",
            {"messages": [{**USER, "content": 4}, FOUR]},
            "messages[0]: Expected",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "content": ""}]},
            "message 1 (from 0) is the",
        ),
        ("conversations", {"messages": [USER, {**FOUR, "weight": 0}]}, "have weight 0"),
        ("conversations", {"messages": [USER, {**FOUR, "weight": 0.5}]}, "weight 0.5"),
        (
            "conversations",
            {"messages": [USER, FOUR], "tools": "[{"},
            "`tools` is text that is not JSON",
        ),
        (
            "conversations",
            {"messages": [USER, FOUR], "tools": [{"type": "web"}]},
            "this one has the type 'web'",
        ),
        (
            "conversations",
            {"messages": [USER, FOUR], "chat_template_kwargs": {"x": 1}},
            "{'x': 1}",
        ),
        (
            "conversations",
            {"text": "2+2? 4"},
            "neither `messages` nor `prompt` and `completion`",
        ),
        ("conversations", {"prompt": "2+2?"}, "neither `messages` nor"),
        (
            "conversations",
            {"prompt": "2+2?", "completion": [USER]},
            "`completion` has no",
        ),
        (
            "conversations",
            {"messages": [{**USER, "content": "\ud800"}, FOUR]},
            "messages[0]: ",
        ),
        (
            "pairs",
            {"prompt": "2+2?", "rejected": "5"},
            "not both `chosen` and `rejected`",
        ),
        (
            "pairs",
            {"prompt": "2+2?", "chosen": "", "rejected": "5"},
            "`chosen` is empty",
        ),
        (
            "pairs",
            {"prompt": "2+2?", "chosen": "4", "rejected": None},
            "`rejected` is empty",
        ),
        ("pairs", {"prompt": "2+2?", "chosen": "4", "rejected": "4"}, "are equal"),
        ("pairs", {"chosen": "4", "rejected": "5"}, "there is no `prompt`"),
        (
            "pairs",
            {"chosen": [USER], "rejected": [USER, FIVE]},
            "`chosen` has no message of the assistant",
        ),
        ("labels", {"messages": [USER, FOUR]}, "not both `label` and a conversation"),
        ("labels", {"messages": [USER, FOUR], "label": "good"}, "`label` is 'good'"),
        ("labels", {"messages": [USER, FOUR], "label": 1}, "`label` is 1"),
    ],
)
def test_unusable_row_is_refused_with_the_reason(
    kind: Kind, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnusableRowError) as caught:
        read_row(1, fields, kind)
    assert reason in caught.value.reason
    assert caught.value.fix


def test_rows_in_the_format_of_other_trainers_are_refused_with_the_fix() -> None:
    with pytest.raises(UnusableRowError) as caught:
        row(conversations=[{"from": "human", "value": "2+2?"}])
    assert "`from` and `value` become `role` and `content`" in caught.value.fix
    with pytest.raises(UnusableRowError) as caught:
        row(chosen=[USER, FOUR], rejected=[USER, FIVE])
    assert "--objective dpo" in caught.value.fix


def test_error_in_a_data_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [USER, FOUR]})
    file.write_text(f"{good}\n\n{good}\n" + json.dumps({"messages": [USER]}) + "\n")
    with pytest.raises(
        ConfigError, match="line 4: no message is the assistant's"
    ) as caught:
        load_rows("data.data_path", str(file), "conversations")
    assert caught.value.field == "data.data_path"
    assert caught.value.value == str(file)
    file.write_text(f"{good}\n{{\n")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        load_rows("data.data_path", str(file), "conversations")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        load_rows("data.data_path", str(file), "conversations")


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, FOUR], "tools": None},
        {
            "messages": [USER, {**FOUR, "tool_calls": [CALL]}],
            "tools": json.dumps([TOOL]),
        },
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(fields) + "\n" for fields in rows)
    )
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet"
    )
    by_file = [
        load_rows("data.data_path", str(tmp_path / name), "conversations")
        for name in ("rows.jsonl", "rows.parquet")
    ]
    assert by_file[0] == by_file[1]
    assert [read.number for read in by_file[0]] == [1, 2]
