"""The tokens that a grammar keeps: from its text to rows of logits, and the softmax
over them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade_rollouts import rollout, turn
from training_samples_example import training_rows
from transformers import AutoTokenizer

from invrl.errors import TrainError
from invrl.train.batches.grammar_masks import GrammarMasks
from invrl.train.batches.micro_batch import TokenSequence
from invrl.train.batches.packing import pack
from invrl.types.batches import GrammarSpan, TrainSample

END = 2
VOCABULARY = 512
DIGITS = json.dumps({"ebnf": 'root ::= [0-9] [0-9]? "!"'})
SCHEMA = json.dumps(
    {"json_schema": '{"type": "object", "properties": {"a": {"enum": [1, 22]}}}'}
)


@pytest.fixture(scope="module")
def masks(model: Path) -> GrammarMasks:
    return GrammarMasks(model, VOCABULARY)


def span(grammar: str, ids: list[int]) -> GrammarSpan:
    return GrammarSpan(start=0, end=len(ids), grammar=grammar)


def tokens(kept: bytes) -> set[int]:
    return set(
        np.flatnonzero(
            np.unpackbits(np.frombuffer(kept, np.uint8), bitorder="little")
        ).tolist()
    )


def test_grammar_mask_keeps_the_tokens_allowed_at_each_position(
    model: Path, masks: GrammarMasks
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [*tokenizer.encode("7!", add_special_tokens=False), END]
    first, second, last = masks.allowed(span(DIGITS, ids), np.array(ids, np.int32))
    digits = {tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)}
    assert digits <= tokens(first)
    assert tokens(first) & {ids[1], END} == set()
    assert digits | {ids[1]} <= tokens(second)
    assert tokens(last) == {END}


def test_token_outside_of_its_grammar_is_an_error(masks: GrammarMasks) -> None:
    with pytest.raises(TrainError, match="token 2 at 0 of 1 is not allowed"):
        masks.allowed(span(SCHEMA, [END]), np.array([END], np.int32))


def test_row_has_masks_only_at_its_forced_tokens(
    model: Path, masks: GrammarMasks
) -> None:
    """A forced turn, a free one, and a forced one whose answer never arrived."""
    ids = [
        *AutoTokenizer.from_pretrained(model).encode("42!", add_special_tokens=False),
        END,
    ]
    forced = replace(turn("a", None, [10, 11], ids), constrained=True, grammar=DIGITS)
    free = turn("b", "a", [12], [60, 61])
    lost = replace(
        turn("c", "b", [13], ids, delivered=False), constrained=True, grammar=DIGITS
    )
    later = turn("d", "c", [14], [62])
    [sample] = training_rows(rollout([forced, free, lost, later]))
    assert sample.grammars == (GrammarSpan(start=2, end=2 + len(ids), grammar=DIGITS),)
    [row] = masks.sequences([sample])
    assert sample.tokens_T[row.wanted_N].tolist() == [*ids, 60, 61, 62]
    assert [kept is None for kept in row.allowed_N] == [
        *[False] * len(ids),
        True,
        True,
        True,
    ]
    assert all(
        token in tokens(kept)
        for token, kept in zip(ids, row.allowed_N, strict=False)
        if kept is not None
    )
    skipped = replace(forced, grammar="")
    [unmasked] = training_rows(rollout([skipped, free]))
    assert masks.sequences([unmasked])[0].allowed_N == ()
    assert unmasked.loss_mask_T.sum() == 2


def row(ids: list[int], kept: tuple[bytes | None, ...] = ()) -> TokenSequence:
    wanted_N = np.arange(1, len(ids))
    return TokenSequence(
        tokens_T=np.array(ids, np.int32),
        wanted_N=wanted_N,
        temperature=1.0,
        allowed_N=kept,
    )


def test_logits_are_shared_only_between_equal_masks() -> None:
    """Equal tokens, chosen freely, under one grammar, and under another."""
    mask = b"\xff\x00"
    other = b"\x0f\x00"
    data = [
        row([1, 2, 3]),
        row([1, 2, 3], (mask, None)),
        row([1, 2, 3], (mask, mask)),
        row([1, 2, 3], (other, None)),
    ]
    [packed] = pack(data, max_tokens=100, share_prefixes=True)
    assert len(packed.tokens_P) == 2
    kept_of = dict(
        zip(
            packed.restricted_M.tolist(),
            [bytes(bits) for bits in packed.allowed_MW],
            strict=True,
        )
    )
    at = 0
    for index, wanted_N in packed.sequences:
        for nth in range(len(wanted_N)):
            projection = int(packed.projection_N[at])
            assert (
                kept_of.get(projection) == (data[index].allowed_N or (None, None))[nth]
            )
            assert packed.project_U[projection] == nth
            at += 1
    # of the first token: free, one, other; of the second: free, one
    assert len(packed.project_U) == 3 + 2


def test_sample_without_grammars_loads_no_tokenizer() -> None:
    """No tokenizer is loaded: the folder is not there."""
    array_T = np.zeros(3, np.float32)
    sample = TrainSample(
        tokens_T=np.array([1, 2, 3], np.int32),
        loss_mask_T=np.array([False, True, True]),
        rollout_logprobs_T=array_T,
        versions_T=np.zeros(3, np.int32),
        reward=0.0,
        temperature=1.0,
        group_id="g",
        rollout_id="r",
        attempt=0,
        turn_ids=("t",),
    )
    [masked_row] = GrammarMasks("/nowhere", VOCABULARY).sequences([sample])
    assert masked_row.wanted_N.tolist() == [1, 2]
    assert masked_row.allowed_N == ()
