"""What a real engine samples under our grammars, and which log-probs it tells of such
tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xgrammar
from numpy.typing import NDArray
from rank_pool import RankPool
from slow_cases import first_quick
from streamed import generate
from transformers import AutoModelForCausalLM, AutoTokenizer

from invrl.algorithms.config import AlgorithmConfig
from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_launcher import Engine
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.types import Tool, ToolChoice
from invrl.types.batches import GrammarSpan, TrainBatch, TrainSample
from invrl.types.sessions import Sampling
from invrl.types.tasks import Json
from invrl.types.weights import WeightVersion

SCHEMA = '{"type": "object", "properties": {"sum": {"enum": [1, 22, 156]}}, "required": ["sum"]}'
ENUM = '{"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"]}'
OPEN = '{"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}'
PARSERS = Parsers(tool_calls="qwen25")
PROMPT = [1, 40, 41, 300, 30, 31]


def constraint(schema: str, *, tools: bool) -> Mapping[str, Json]:
    offered = (Tool(name="calc", parameters=ENUM),) if tools else ()
    return PARSERS.constraint(offered, ToolChoice(), parallel=False, schema=schema)


async def sampled(
    client: SglangClient,
    number: int,
    extra: Mapping[str, Json],
    temperature: float,
    new: int = 64,
) -> tuple[list[int], NDArray[np.float32]]:
    request = GenerateRequest(
        rid=f"constrained-{number}-{secrets.token_hex(8)}",
        input_ids_T=np.array(PROMPT, np.int32),
        sampling=Sampling(temperature=temperature, max_new_tokens=new),
        extra_sampling=extra,
    )
    result = await generate(client, request)
    return result.ids_T.tolist(), result.logprobs_T


async def test_real_engine_with_tools_and_a_format_calls_or_replies(
    router_client: SglangClient, tiny_model: Path
):
    """A random model takes both ways; neither leaves its form.

    It opens an answer in 7 of 100 replies: 250 tries miss all of them once in 10^8
    runs.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    extra = constraint(SCHEMA, tools=True)
    calls = answers = 0
    for number in range(250):
        ids, _ = await sampled(router_client, number, extra, 2.0, new=100)
        text = tokenizer.decode(ids).removesuffix("<|im_end|>").strip()
        if text.startswith("<tool_call>"):
            first = text.removeprefix("<tool_call>").partition("</tool_call>")[0]
            assert json.loads(first)["name"] == "calc"
            calls += 1
        else:
            assert json.loads(text)["sum"] in (1, 22, 156)
            answers += 1
        if calls >= 2 and answers >= 2:
            break
    assert calls >= 1
    assert answers >= 1


def _walked(
    tokenizer, ids: Sequence[int], extra: Mapping[str, Json]
) -> tuple[NDArray[np.bool_], xgrammar.GrammarMatcher]:
    """Tokens kept in each place, [T, 512], and the grammar's state after the ids."""
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=512, stop_token_ids=[2]
    )
    compiler = xgrammar.GrammarCompiler(info)
    if "json_schema" in extra:
        compiled = compiler.compile_json_schema(
            str(extra["json_schema"]), any_whitespace=True
        )
    else:
        compiled = compiler.compile_grammar(str(extra["ebnf"]))
    matcher = xgrammar.GrammarMatcher(compiled)
    kept = np.ones((len(ids), 512), np.bool_)
    for at, token in enumerate(ids):
        kept[at] = _kept_now(matcher)
        assert kept[at, token]
        assert matcher.accept_token(token)
    return kept, matcher


def _kept_now(matcher: xgrammar.GrammarMatcher) -> NDArray[np.bool_]:
    bitmask = xgrammar.allocate_token_bitmask(1, 512)
    matcher.fill_next_token_bitmask(bitmask)
    return np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little").astype(bool)


def kept_tokens(
    tokenizer, ids: Sequence[int], extra: Mapping[str, Json]
) -> NDArray[np.bool_]:
    """[T, 512]: the tokens that the grammar lets be sampled in each place, by XGrammar
    itself."""
    return _walked(tokenizer, ids, extra)[0]


def next_kept(
    tokenizer, ids: Sequence[int], extra: Mapping[str, Json]
) -> NDArray[np.bool_]:
    """[512]: those that may come after the ids."""
    return _kept_now(_walked(tokenizer, ids, extra)[1])


@pytest.mark.parametrize("temperature", first_quick([0.7, 1.0]))
@pytest.mark.parametrize(
    ("schema", "tools"), first_quick([(SCHEMA, True), (SCHEMA, False), (OPEN, False)])
)
async def test_logprobs_under_a_grammar_are_those_of_the_kept_tokens(
    tiny_fleet: Fleet, tiny_model: Path, temperature: float, schema: str, tools: bool
):
    """Against a float64 softmax over the tokens that the grammar keeps, from
    transformers' logits."""
    engine: Engine = tiny_fleet.engines["engine-0"]
    if await engine.client.weight_version() != "0":
        pytest.skip("the shared engine has been updated")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    extra = constraint(schema, tools=tools)
    for number in range(4):
        ids, logprobs_T = await sampled(engine.client, number, extra, temperature)
        with torch.no_grad():
            logits_TV = (
                model(torch.tensor([PROMPT + ids]))
                .logits[0, len(PROMPT) - 1 : -1]
                .double()
            )
        logits_TV /= temperature
        free_T = (
            torch.log_softmax(logits_TV, -1)
            .gather(1, torch.tensor(ids)[:, None])[:, 0]
            .numpy()
        )
        logits_TV[~torch.from_numpy(kept_tokens(tokenizer, ids, extra))] = -torch.inf
        want_T = (
            torch.log_softmax(logits_TV, -1)
            .gather(1, torch.tensor(ids)[:, None])[:, 0]
            .numpy()
        )
        assert np.abs(logprobs_T - want_T).max() < 1e-4
        assert np.abs(free_T - want_T).max() > 0.1  # the mask is what makes them equal


FORCED = ((SCHEMA, False), (OPEN, False), (SCHEMA, True))


def sample_of(
    number: int,
    ids: Sequence[int],
    logprobs_T: NDArray[np.float32],
    extra: Mapping[str, Json],
    temperature: float,
) -> TrainSample:
    trained_T = np.array([False] * len(PROMPT) + [True] * len(ids))
    span = GrammarSpan(start=len(PROMPT), end=len(trained_T), grammar=json.dumps(extra))
    return TrainSample(
        tokens_T=np.array([*PROMPT, *ids], np.int32),
        loss_mask_T=trained_T,
        rollout_logprobs_T=np.concatenate(
            [np.zeros(len(PROMPT), np.float32), logprobs_T]
        ),
        versions_T=np.where(trained_T, 0, -1).astype(np.int32),
        reward=1.0,
        temperature=temperature,
        group_id="g",
        rollout_id=f"r{number}",
        attempt=0,
        turn_ids=("t",),
        grammars=(span,),
    )


def batch_of(samples: Sequence[TrainSample]) -> TrainBatch:
    return TrainBatch(
        batch_id=0,
        version=WeightVersion(0),
        samples=tuple(samples),
        advantages=tuple(
            (n + 1) * sample.loss_mask_T.astype(np.float32)
            for n, sample in enumerate(samples)
        ),
    )


@pytest.mark.parametrize("temperature", first_quick([0.7, 1.0]))
async def test_the_trainer_agrees_with_the_engine_under_a_grammar(
    tiny_fleet: Fleet, tiny_model: Path, pool: RankPool, temperature: float
):
    engine: Engine = tiny_fleet.engines["engine-0"]
    if await engine.client.weight_version() != "0":
        pytest.skip("the shared engine has been updated")
    samples: list[TrainSample] = []
    for number, (schema, tools) in enumerate(FORCED):
        extra = constraint(schema, tools=tools)
        ids, logprobs_T = await sampled(engine.client, number, extra, temperature)
        samples.append(sample_of(number, ids, logprobs_T, extra, temperature))
    trainer = pool.build(tiny_model, algorithm=AlgorithmConfig(correction="none"))
    [measured] = trainer.call("token_logprobs", [(batch_of(samples),)])
    for sample, array_T in zip(samples, measured, strict=True):
        assert np.abs(array_T - sample.rollout_logprobs_T).max() < 1e-4


def test_gradient_under_a_grammar_is_that_of_the_masked_softmax(
    tiny_model: Path, pool: RankPool
):
    """Log-probs of random forced replies and the gradient of a policy loss on them,
    against float64 autograd over transformers' model and the tokens that XGrammar
    keeps."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rng = np.random.default_rng(0)
    samples: list[TrainSample] = []
    kept: list[NDArray[np.bool_]] = []
    for number, (schema, tools) in enumerate(FORCED * 2):
        extra = constraint(schema, tools=tools)
        ids: list[int] = []
        while len(ids) < 40 and 2 not in ids:
            choices = np.flatnonzero(next_kept(tokenizer, ids, extra))
            ids.append(int(rng.choice(choices)))
        samples.append(
            sample_of(number, ids, np.zeros(len(ids), np.float32), extra, 0.7)
        )
        kept.append(kept_tokens(tokenizer, ids, extra))
    batch = batch_of(samples)
    trainer = pool.build(tiny_model, algorithm=AlgorithmConfig(correction="none"))
    [measured] = trainer.call("token_logprobs", [(batch,)])
    trainer.train(batch)
    [step] = trainer.steps()

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for n, (sample, kept_TV) in enumerate(zip(samples, kept, strict=True)):
        ids = sample.tokens_T.tolist()
        logits_TV = model(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1] / 0.7
        logprobs_TV = logits_TV.masked_fill(
            ~torch.from_numpy(kept_TV), -torch.inf
        ).log_softmax(-1)
        picked_T = logprobs_TV.gather(1, torch.tensor(ids[len(PROMPT) :])[:, None])[
            :, 0
        ]
        assert (
            np.abs(measured[n][len(PROMPT) :] - picked_T.detach().numpy()).max() < 1e-4
        )
        loss = loss - (n + 1) * picked_T.sum() / batch.trained.tokens
    loss.backward()
    compared = 0
    for name, parameter in model.named_parameters():
        if name in step.gradients:
            assert parameter.grad is not None
            difference = (
                torch.from_numpy(step.gradients[name]).double() - parameter.grad
            )
            assert difference.norm() <= 1e-4 * parameter.grad.norm() + 1e-9, name
            compared += 1
    assert compared > 10
