"""Answers of an engine that cannot be true: none becomes a turn, and whoever asked
learns why."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openai
import pytest
from fakes import FakeEngine, random_reply
from running_gateway import ASK, ENV_KEY, running
from streamed import generate

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.fleet.engine_health import wrong_reply
from invrl.errors import ServerError, WrongReplyError
from invrl.gateway.rendering.renderer import Renderer
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion

NEWEST = WeightVersion(3)
TOP = 2
LIMITS = EngineLimits(vocab_size=512, context_length=2048)


def token(token_id: object) -> Callable[[dict], dict]:
    """The last token, in both places where it stands, is another one."""

    def spoil(event: dict) -> dict:
        event["output_ids"][-1] = token_id
        event["meta_info"]["output_token_logprobs"][-1][1] = token_id
        return event

    return spoil


def logprob(value: object) -> Callable[[dict], dict]:
    def spoil(event: dict) -> dict:
        event["meta_info"]["output_token_logprobs"][-1][0] = value
        return event

    return spoil


def meta(**fields: object) -> Callable[[dict], dict]:
    def spoil(event: dict) -> dict:
        event["meta_info"].update(fields)
        return event

    return spoil


def without(field: str) -> Callable[[dict], dict]:
    def spoil(event: dict) -> dict:
        del event["meta_info"][field]
        return event

    return spoil


def top(row: object) -> Callable[[dict], dict]:
    def spoil(event: dict) -> dict:
        event["meta_info"]["output_top_logprobs"][-1] = row
        return event

    return spoil


def version(name: str) -> Callable[[dict], dict]:
    def spoil(event: dict) -> dict:
        for span in event["meta_info"]["weight_versions"]:
            span["version"] = name
        return meta(weight_version=name)(event)

    return spoil


def tokens_lost(event: dict) -> dict:
    event["meta_info"]["output_token_logprobs"] = event["meta_info"][
        "output_token_logprobs"
    ][:-1]
    return event


def ids_lost(event: dict) -> dict:
    event["output_ids"] = event["output_ids"][:-1]
    return event


def nothing_sampled(event: dict) -> dict:
    event["output_ids"] = []
    return meta(
        output_token_logprobs=[],
        output_top_logprobs=[],
        completion_tokens=0,
        weight_versions=[],
    )(event)


def more_than_asked(event: dict) -> dict:
    extra = [7] * 100
    event["output_ids"] += extra
    logprobs = event["meta_info"]["output_token_logprobs"] + [[-1.0, 7, None]] * 100
    tops = event["meta_info"]["output_top_logprobs"] + [[[-1.0, 7, None]] * TOP] * 100
    count = event["meta_info"]["completion_tokens"] + 100
    spans = [{"version": "0", "start": 0, "end": count}]
    return meta(
        output_token_logprobs=logprobs,
        output_top_logprobs=tops,
        completion_tokens=count,
        weight_versions=spans,
    )(event)


GOOD_TOP = [
    [-1.0, 7, None],
    [-2.0, 8, None],
]
WRONG: dict[str, tuple[Callable[[dict], object], str]] = {
    "id beyond the vocabulary": (
        token(512),
        "token id 512 is outside the vocabulary of 512",
    ),
    "negative id": (token(-1), "token id -1 is outside"),
    "id of 2**31": (token(2**31), "is outside"),
    "id of 2**64": (token(2**64), "is outside|cannot be read"),
    "id that is no integer": (token(7.5), "cannot be read"),
    "id that is text": (token("7"), "cannot be read"),
    "positive log-prob": (logprob(5.0), "has the log-prob 5.0"),
    "log-prob of -1e300": (logprob(-1e300), "has the log-prob -1e[+]300"),
    "log-prob of -1.7e38": (logprob(-1.7e38), "has the log-prob -1.7e[+]38"),
    "log-prob NaN": (logprob(float("nan")), "cannot be read"),
    "log-prob infinite": (logprob(float("-inf")), "cannot be read"),
    "log-prob null": (logprob(None), "cannot be read"),
    "log-prob that is text": (logprob("-1"), "cannot be read"),
    "fewer log-probs than ids": (tokens_lost, "token ids came with|likeliest"),
    "fewer ids than log-probs": (ids_lost, "token ids came with"),
    "no log-probs": (meta(output_token_logprobs=[]), "token ids came with 0 log-probs"),
    "no field of log-probs": (
        without("output_token_logprobs"),
        "token ids came with 0 log-probs",
    ),
    "log-probs of other tokens": (
        lambda event: {**event, "output_ids": [9] * len(event["output_ids"])},
        "of other tokens",
    ),
    "nothing sampled": (
        nothing_sampled,
        "without any token|are said to have been sampled",
    ),
    "more tokens than asked for": (more_than_asked, "were asked for"),
    "too few tokens counted": (
        meta(completion_tokens=1),
        "are said to have been sampled",
    ),
    "too many tokens counted": (
        meta(completion_tokens=99),
        "are said to have been sampled",
    ),
    "version of the future": (
        version("4"),
        "version 4 is from the future: the newest is 3",
    ),
    "version with 5,000 digits": (version("9" * 5000), "no version of ours"),
    "version that is no number": (version("default"), "no version of ours"),
    "negative version": (version("-1"), "no version of ours"),
    "spans with a gap": (
        meta(weight_versions=[{"version": "0", "start": 1, "end": 13}]),
        "do not cover 13 sampled tokens",
    ),
    "answer to another request": (meta(id="other"), "answered with generation other"),
    "no versions": (meta(weight_versions=None), "cannot be read"),
    "versions of no token": (meta(weight_versions=[]), "do not cover 13 sampled"),
    "no finish reason": (
        meta(finish_reason=None),
        "breaks off",
    ),
    "unknown finish reason": (meta(finish_reason={"type": "bored"}), "cannot be read"),
    "stop token beyond the vocabulary": (
        meta(finish_reason={"type": "stop", "matched": 512}),
        "token id 512 is outside",
    ),
    "another prompt": (meta(prompt_tokens=11), "consumed 11 prompt tokens, 10 were"),
    "more cached than the prompt has": (
        meta(cached_tokens=99),
        "are said to be cached",
    ),
    "negative number of cached tokens": (
        meta(cached_tokens=-1),
        "are said to be cached",
    ),
    "a likely token beyond the vocabulary": (
        top([[-1.0, 512, None], [-2.0, 8, None]]),
        "is outside",
    ),
    "a likely token with a positive log-prob": (
        top([[2.0, 7, None], [-2.0, 8, None]]),
        "log-prob 2.0",
    ),
    "fewer likely tokens than asked for": (top(GOOD_TOP[:1]), "likeliest tokens"),
    "an event that is a list": (lambda event: [event], "cannot be read"),
    "an empty event": (lambda _: {}, "failed a generation"),
}


async def ask(client: SglangClient, *, interval: int | None = None) -> None:
    request = GenerateRequest(
        rid=secrets.token_hex(8),
        input_ids_T=np.arange(10, dtype=np.int32),
        sampling=Sampling(max_new_tokens=20),
        stop_token_ids=(2,),
        top_logprobs=TOP,
        stream_interval=interval,
    )
    await generate(client, request)


@pytest.mark.parametrize("interval", [None, 32])
async def test_an_answer_that_cannot_be_true_is_refused_with_its_reason(
    interval: int | None,
):
    async with FakeEngine(random_reply()) as engine:
        wrong_replies: list[str] = []
        async with SglangClient(
            engine.url,
            limits=LIMITS,
            newest_version=lambda: NEWEST,
            on_wrong_reply=lambda: wrong_replies.append("one"),
        ) as client:
            await ask(client, interval=interval)
            for kind, (spoil, reason) in WRONG.items():
                engine.spoil = spoil
                wrong_replies.clear()
                with pytest.raises(ServerError, match=reason) as refused:
                    await ask(client, interval=interval)
                # which is how an engine reports an error of its own
                is_failure = kind == "an empty event"
                # which is how a connection breaks
                is_broken = kind == "no finish reason"
                if not is_failure and not is_broken:
                    assert isinstance(refused.value, WrongReplyError), kind
                    assert wrong_replies == ["one"], kind


@pytest.mark.parametrize(
    "spoil",
    [
        logprob(0.0),
        logprob(1e-4),
        logprob(-200),
        version("3"),
        top([[None, 7, None], [-1e30, 8, None]]),
    ],
)
async def test_what_rounding_and_older_weights_make_is_taken(
    spoil: Callable[[dict], dict],
):
    async with FakeEngine(random_reply()) as engine:
        engine.spoil = spoil
        async with SglangClient(
            engine.url, limits=LIMITS, newest_version=lambda: NEWEST
        ) as client:
            await ask(client)


async def chat(client: openai.AsyncOpenAI, *, stream: bool) -> None:
    if not stream:
        await client.chat.completions.create(model="tiny", messages=[ASK])
        return
    async for _ in await client.chat.completions.create(
        model="tiny", messages=[ASK], stream=True
    ):
        pass


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_wrong_answer_is_a_failed_generation_and_no_turn(
    tmp_path: Path, model: Path, renderer: Renderer, stream: bool
):
    async with running(tmp_path, model, renderer) as gateway:
        for spoil in (
            token(2**64),
            token(-5),
            logprob(5.0),
            logprob(-1e300),
            more_than_asked_of_gateway,
        ):
            [session] = await gateway.open()
            gateway.engine.spoil = spoil
            with pytest.raises(openai.APIError) as failed:
                await chat(gateway.client(session), stream=stream)
            assert "answer is wrong" in str(failed.value)
            assert "internal" not in str(failed.value)
            if isinstance(failed.value, openai.APIStatusError):
                assert failed.value.status_code in (502, 503)
            assert not any(turn.delivered for turn in gateway.turns(session))
            assert {turn.finish_reason for turn in gateway.turns(session)} <= {"abort"}
            assert all(
                np.all(turn.sampled_ids_T < 512) for turn in gateway.turns(session)
            )
        assert ENV_KEY not in str(failed.value)


def more_than_asked_of_gateway(event: dict) -> dict:
    event["meta_info"].setdefault("output_top_logprobs", [])
    return more_than_asked(event)


async def test_an_engine_under_suspicion_is_asked_and_convicted_by_its_answer():
    async with (
        FakeEngine(random_reply()) as engine,
        SglangClient(engine.url, limits=LIMITS) as client,
    ):

        async def verdict() -> str:
            return await wrong_reply(
                client, vocab_size=512, newest_version=NEWEST, deadline_s=60
            )

        assert await verdict() == ""
        engine.spoil = token(600)
        assert "token id 600 is outside" in await verdict()
        engine.spoil = version("9")
        assert "claims weight version 9; the newest is 3" in await verdict()
        engine.spoil = lambda event: event
        engine.drop_connections = 9
        assert await verdict() == "", "silence is judged by its own rules"
