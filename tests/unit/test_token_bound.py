"""The fewest tokens that a text can have: never more than a tokenizer makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import make_tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from invrl.gateway.rendering.token_bound import TokenBound, _byte_letters, token_bound


def byte_level(*merged: str) -> Tokenizer:
    """Every byte, and each of `merged` built up letter by letter."""
    letters = _byte_letters()
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    merges = []
    for word in merged:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bound_of(tokenizer: Tokenizer) -> TokenBound | None:
    return token_bound(json.loads(tokenizer.to_str()))


def test_byte_table_equals_that_of_the_tokenizers_package():
    assert sorted(_byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@given(text=st.text(alphabet="abcdeé \u0301\u0300K12\u212a🙂", max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_text_has_fewer_tokens_than_its_bound(text: str):
    tokenizer = byte_level("abcde", "ab1", "123")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|abcabcabc|>"])
    bound = bound_of(tokenizer)
    assert bound is not None
    for whole in (text, text + "<|abcabcabc|>" * 3 + text, text * 20):
        count = len(tokenizer.encode(whole, add_special_tokens=False))
        assert bound.min_tokens(whole) <= count


def test_token_bound_is_reached_by_repeated_long_tokens():
    bound = bound_of(byte_level("abcde", "123"))
    assert bound is not None
    assert bound.max_characters == (5, 3)
    assert bound.min_tokens("abcde" * 1000) == 1000
    assert bound.min_tokens("123" * 1000 + "1") == 1001
    assert bound.min_tokens("") == 0
    assert bound.min_tokens("\ud800") == 0  # half a surrogate pair


def test_letters_that_compose_with_marks_do_not_count_towards_the_bound():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    bound = bound_of(tokenizer)
    assert bound is not None
    assert bound.min_tokens("e\u0301" * 1000) == 0


def test_there_is_no_bound_for_tokenizers_that_may_lose_letters():
    good = byte_level("abcde")
    for normalizer in (
        normalizers.Lowercase(),
        normalizers.NFKC(),
        normalizers.Replace("a", ""),
    ):
        tokenizer = byte_level("abcde")
        tokenizer.normalizer = normalizer
        assert bound_of(tokenizer) is None
    tokenizer = byte_level("abcde")
    split = pre_tokenizers.Split("a", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(use_regex=False)]
    )
    assert bound_of(tokenizer) is None
    tokenizer = byte_level("abcde")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert bound_of(tokenizer) is None
    assert bound_of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
    described = json.loads(good.to_str())
    del described["model"]["vocab"]["a"]
    assert token_bound(described) is None
    assert token_bound({}) is None


@pytest.mark.parametrize(
    "text", ["word " * 5000, "0123456789" * 3000, "naïve café " * 3000]
)
def test_tokenizer_of_a_model_folder_has_a_token_bound(tmp_path: Path, text: str):
    folder = make_tiny_model(tmp_path / "tiny")
    bound = token_bound(json.loads((folder / "tokenizer.json").read_text()))
    assert bound is not None
    count = len(
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode(
            text, add_special_tokens=False
        )
    )
    assert 0 < bound.min_tokens(text) <= count
