"""The gateway under generated requests: schemathesis on what OpenAPI shows, hypothesis
on the dialects.

Both are bounded and seeded: a failure comes back in the next run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from running_gateway import ENV_KEY, Running, running

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.store.lease_store import LeaseStore
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.tasks import Task

pytestmark = pytest.mark.slow

EXAMPLES = os.environ.get("INVRL_FUZZ_EXAMPLES", "40")
"""Generated requests per operation and phase; more by hand."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1}'},
}
COMMON = {"model": "tiny", "temperature": 0.7, "top_p": 0.9, "stream": False}
OPENAI = {
    **COMMON,
    "max_tokens": 8,
    "stop": ["x"],
    "n": 2,
    "seed": 3,
    "user": "u",
    "min_p": 0.1,
    "top_k": 5,
}
CLAUDE = {
    "model": "tiny",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
GOOGLE = {
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}]},
        {
            "role": "model",
            "parts": [
                {"text": "r", "thought": True, "thoughtSignature": "s"},
                {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}},
            ],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "f", "response": {"output": 1}}}],
        },
    ],
    "system_instruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        "maxOutputTokens": 8,
        "stopSequences": ["x"],
        "topK": 5,
        "candidateCount": 2,
        "thinkingConfig": {"includeThoughts": True},
    },
    "safetySettings": [{"category": "c", "threshold": "t"}],
}
RICH: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        **OPENAI,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL],
                "reasoning_content": "r",
            },
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "logprobs": True,
        "reasoning_effort": "low",
        "metadata": {"k": "v"},
    },
    "/completions": {**OPENAI, "prompt": "hi"},
    "/responses": {
        **COMMON,
        "max_output_tokens": 8,
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "f",
                "arguments": '{"a": 1}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "store": True,
    },
    "/messages": {
        **COMMON,
        **CLAUDE,
        "max_tokens": 8,
        "stop_sequences": ["x"],
        "top_k": 5,
    },
    "/messages/count_tokens": CLAUDE,
    "/models/tiny:generateContent": GOOGLE,
    "/models/tiny:streamGenerateContent?alt=sse": GOOGLE,
    "/models/tiny:countTokens": {"generateContentRequest": GOOGLE},
}
"""For each route, a request with most of what it takes."""


async def test_generated_requests_are_answered_as_openapi_says(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    """Each operation on open sessions of its own, one that is closed, and one that is
    not there."""
    async with running(
        tmp_path, model, renderer, leases=True, session={"max_open": 1000}
    ) as gateway:
        store = LeaseStore(tmp_path / "run.db")
        member = GroupMember(index=0, attempt=0)
        for number in range(300):  # a lease that has to wait takes up to a minute
            task = Task(id=f"t{number}", payload={}, label="", split="train")
            store.offer(GroupLease(group_id=f"g{number}", task=task, members=(member,)))
        [closed] = await gateway.open(purpose="serve")
        await gateway.finish(closed)
        schema = (await gateway.env("/openapi.json")).json()
        for path in schema["paths"].values():
            for operation in path.values():
                own = [
                    session.id
                    for session in await gateway.open(members=4, purpose="serve")
                ]
                for parameter in operation.get("parameters", ()):
                    parameter["schema"] |= {"enum": [*own, closed.id, "ses-nobody"]}
        (tmp_path / "openapi.json").write_text(json.dumps(schema))
        command = [
            *(
                sys.executable,
                "-m",
                "schemathesis.cli",
                "run",
                "openapi.json",
                "--url",
                gateway.url,
            ),
            *(
                "-H",
                f"Authorization: Bearer {ENV_KEY}",
                "--generation-with-security-parameters",
                "false",
            ),
            *(
                "--checks",
                ",".join(CHECKS),
                "--phases",
                "examples,coverage,fuzzing",
                "--continue-on-failure",
            ),
            *(
                "--generation-deterministic",
                "--max-examples",
                EXAMPLES,
                "--max-failures",
                "20",
            ),
            *(
                "--report-json-path",
                "report.json",
                "--no-color",
                "--no-shrink",
                "--warnings",
                "off",
            ),
        ]
        run = await asyncio.create_subprocess_exec(
            *command,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed, _ = await asyncio.wait_for(run.communicate(), 540)
        finally:
            if run.returncode is None:
                run.kill()
        store.close()
        assert run.returncode == 0, printed.decode()[-6000:]
        accepted = json.loads((tmp_path / "report.json").read_text())["valid_rates"]
        assert len(accepted) == sum(len(path) for path in schema["paths"].values())
        assert all(
            sum(phase["accepted"] for phase in phases.values())
            for phases in accepted.values()
        ), accepted


# ---------------------------------------------- dialects, which OpenAPI does not show


def spoiled(draw: st.DrawFn, value: Any, odds: int) -> Any:
    """`value` with, one time in `odds` at each place, something else there, or more, or
    less."""
    if draw(st.integers(1, odds)) == 1:
        return draw(JSON)
    if isinstance(value, list):
        kept = [spoiled(draw, item, odds) for item in value]
        return (
            kept * draw(st.integers(0, 3)) if draw(st.integers(1, odds)) == 1 else kept
        )
    if isinstance(value, dict):
        kept = {name: spoiled(draw, item, odds) for name, item in value.items()}
        if kept and draw(st.integers(1, odds)) == 1:
            kept.pop(draw(st.sampled_from(sorted(kept))))
        if draw(st.integers(1, odds)) == 1:
            kept[draw(st.text(max_size=8))] = draw(JSON)
        return kept
    return value


NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**40, 1e308, 1e-320])
)
WORDS = (
    "auto",
    "none",
    "required",
    "any",
    "tool",
    "function",
    "text",
    "user",
    "assistant",
    "system",
    "f",
    "c1",
)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "\x00", "\ud800", "<|im_end|>", "<think>", "{", *WORDS]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def fuzzed_request(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a rich request of its dialect with something wrong in it. One in
    four bodies is left as it is: Hypothesis prefers small numbers, so that even at odds
    of 1000 hardly a long body stays whole."""
    path = draw(st.sampled_from(sorted(RICH)))
    body = RICH[path]
    odds = draw(st.sampled_from([0, 10, 100, 1000]))
    if odds:
        body = spoiled(draw, body, odds)
    raw = json.dumps(body).encode()
    if draw(st.integers(1, 10)) == 1:
        at = draw(st.integers(0, len(raw)))
        raw = (
            raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :]
        )
    return path, raw


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    parsers = Parsers(tool_calls="qwen25", reasoning="qwen3")
    async with running(
        tmp_path, model, renderer, parsers=parsers
    ) as gateway_with_parsers:
        yield gateway_with_parsers


async def test_fuzzed_requests_of_the_dialects_are_answered_or_refused_in_their_shape(
    gateway: Running,
):
    [session] = await gateway.open(purpose="serve")
    loop = asyncio.get_running_loop()
    seen = Counter[tuple[str, bool]]()
    for path, body in RICH.items():
        whole = await gateway.http.post(session.base_url + path, json=body)
        assert whole.status_code == 200, (path, whole.text)
    count = int(EXAMPLES) * 10

    @seed(7)
    @settings(
        phases=[Phase.generate],
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzzed_request())
    def fuzz(asked: tuple[str, bytes]) -> None:
        path, raw = asked
        url = f"{gateway.url}/s/{session.key}/v1{path}"
        answer = asyncio.run_coroutine_threadsafe(
            gateway.http.post(url, content=raw), loop
        ).result(120)
        seen[path, answer.status_code < 300] += 1
        if answer.status_code >= 300:
            assert 400 <= answer.status_code < 500, (path, raw, answer.text)
            answer_body = answer.json()
            assert set(answer_body) == (
                {"type", "error", "request_id"} if "messages" in path else {"error"}
            )
            fields = {"message", "type", "param", "code"}
            if "messages" in path:
                fields = {"type", "message"}
            elif "tiny:" in path:
                fields = {"code", "message", "status"}
            assert set(answer_body["error"]) == fields
        elif answer.headers["content-type"] == "application/json":
            answer.json()
        else:
            assert "error" not in answer.text, (path, raw, answer.text)

    await asyncio.to_thread(fuzz)
    assert {(path, good) for path in RICH for good in (True, False)} == set(seen), seen
