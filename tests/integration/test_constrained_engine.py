"""What a real engine samples under our grammars, and which log-probs it tells of such tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xgrammar
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from invrl.gateway.message import Tool, ToolChoice
from invrl.gateway.parsing import Parsers
from invrl.rollout.fleet import Engine, Fleet
from invrl.rollout.sglang_client import GenerateRequest, SglangClient
from invrl.types import Json, Sampling

SCHEMA = '{"type": "object", "properties": {"sum": {"enum": [1, 22, 156]}}, "required": ["sum"]}'
ENUM = '{"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"]}'
OPEN = '{"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}'
PARSERS = Parsers(tool_calls="qwen25")
PROMPT = [1, 40, 41, 300, 30, 31]


def constraint(schema: str, *, tools: bool) -> Mapping[str, Json]:
    offered = (Tool(name="calc", parameters=ENUM),) if tools else ()
    return PARSERS.constraint(offered, ToolChoice(), parallel=False, schema=schema)


async def sampled(
    client: SglangClient, number: int, extra: Mapping[str, Json], temperature: float, new: int = 64
) -> tuple[list[int], NDArray[np.float32]]:
    request = GenerateRequest(
        rid=f"constrained-{number}-{temperature}",
        input_ids_T=np.array(PROMPT, np.int32),
        sampling=Sampling(temperature=temperature, max_new_tokens=new),
        extra_sampling=extra,
    )
    result = await client.generate(request)
    return result.ids_T.tolist(), result.logprobs_T


async def test_with_tools_and_a_format_a_real_engine_calls_or_answers(
    router_client: SglangClient, tiny_model: Path
):
    """A random model takes both ways; neither leaves its form."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    extra = constraint(SCHEMA, tools=True)
    calls = answers = 0
    for number in range(40):
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


def kept_tokens(tokenizer, ids: Sequence[int], extra: Mapping[str, Json]) -> NDArray[np.bool_]:
    """[T, 512]: the tokens that the grammar lets be sampled in each place, by XGrammar itself."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=512, stop_token_ids=[2])
    compiler = xgrammar.GrammarCompiler(info)
    if "json_schema" in extra:
        compiled = compiler.compile_json_schema(str(extra["json_schema"]), any_whitespace=True)
    else:
        compiled = compiler.compile_grammar(str(extra["ebnf"]))
    matcher = xgrammar.GrammarMatcher(compiled)
    kept = np.ones((len(ids), 512), np.bool_)
    bitmask = xgrammar.allocate_token_bitmask(1, 512)
    for at, token in enumerate(ids):
        matcher.fill_next_token_bitmask(bitmask)
        kept[at] = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little").astype(bool)
        assert kept[at, token]
        assert matcher.accept_token(token)
    return kept


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("schema", "tools"), [(SCHEMA, False), (OPEN, False), (SCHEMA, True)])
async def test_logprobs_under_a_grammar_are_those_of_the_kept_tokens(
    tiny_fleet: Fleet, tiny_model: Path, temperature: float, schema: str, tools: bool
):
    """Against a float64 softmax over the tokens that the grammar keeps, from transformers' logits."""
    engine: Engine = tiny_fleet.engines["engine-0"]
    if await engine.client.weight_version() != "0":
        pytest.skip("the shared engine has been updated")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    extra = constraint(schema, tools=tools)
    for number in range(4):
        ids, logprobs_T = await sampled(engine.client, number, extra, temperature)
        with torch.no_grad():
            logits_TV = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].double()
        logits_TV /= temperature
        free_T = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        logits_TV[~torch.from_numpy(kept_tokens(tokenizer, ids, extra))] = -torch.inf
        want_T = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        assert np.abs(logprobs_T - want_T).max() < 1e-4
        assert np.abs(free_T - want_T).max() > 0.1  # the mask is what makes them equal
