"""The run's copy of its tokenizer: what is in it, and the text of single tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from invrl.store import tokenizer_folder
from invrl.store.tokenizer_folder import TOKENIZER_NAME, copy_tokenizer, token_reader


def test_a_copied_run_folder_shows_text_without_the_model(
    model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    copy_tokenizer(model, run / TOKENIZER_NAME)
    assert not (run / TOKENIZER_NAME / "model.safetensors").exists()
    assert not list((run / TOKENIZER_NAME).glob("*.new"))
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    reader = token_reader(copied)
    assert reader is not None
    text = "héllo <|im_end|>\n🙂 x"
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert reader.decode(ids) == text
    joined = "".join(reader.texts(ids))
    assert (
        joined.replace("\\xf0\\x9f\\x99\\x82", "🙂").replace("\\xc3\\xa9", "é") == text
    )


def test_template_of_the_run_replaces_the_models(model: Path, tmp_path: Path) -> None:
    copy_tokenizer(model, tmp_path, chat_template="{{ messages }}")
    copy_tokenizer(model, tmp_path, chat_template="{{ messages }}")
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


def test_tokenizer_file_over_the_size_limit_is_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (model / "tokenizer.json").stat().st_size
    monkeypatch.setattr(tokenizer_folder, "MAX_FILE_BYTES", size - 1)
    copy_tokenizer(model, tmp_path / "run" / TOKENIZER_NAME)
    assert not (tmp_path / "run" / TOKENIZER_NAME / "tokenizer.json").exists()
    assert token_reader(tmp_path / "run") is None
    assert token_reader(tmp_path / "run", model) is not None


def test_torn_tokenizer_copy_is_not_used(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / TOKENIZER_NAME
    copy_tokenizer(model, folder)
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content[: len(content) // 2])
    assert token_reader(tmp_path) is None
    assert token_reader(tmp_path, model) is not None


def test_id_outside_of_the_vocabulary_has_a_name(model: Path, tmp_path: Path) -> None:
    reader = token_reader(tmp_path, model)
    assert reader is not None
    assert reader.texts([10**6, -1]) == ["<1000000>", "<-1>"]


def test_byte_level_tokens_are_the_bytes_that_they_stand_for(tmp_path: Path) -> None:
    vocabulary = {
        "Ġhi": 0,
        "Ċ": 1,
        "Ã": 2,
        "©": 3,
        "Ã©": 4,
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ã", "©")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|Ġ|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = token_reader(tmp_path, tmp_path)
    assert reader is not None
    assert reader.texts([0, 1, 2, 4, 5]) == [" hi", "\n", "\\xc3", "é", "<|Ġ|>"]


def test_sentencepiece_tokens_have_their_spaces_and_bytes(tmp_path: Path) -> None:
    vocabulary = {"▁hi": 0, "<0x0A>": 1, "<0xC3>": 2, "é": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = token_reader(tmp_path, tmp_path)
    assert reader is not None
    assert reader.texts([0, 1, 2, 3]) == [" hi", "\n", "\\xc3", "é"]
