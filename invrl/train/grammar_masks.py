"""Which tokens a grammar let the engine sample, found again from the grammar and the sampled ids.

An engine under a grammar samples from the softmax over the tokens that the grammar keeps at that place, and
tells log-probs of that distribution. A grammar is deterministic: XGrammar, asked with the same grammar, the
same tokenizer and the same ids, keeps the same tokens here as it did there. So what travels with a sample is
the grammar's text, not a set of tokens per place."""

import json
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from invrl.errors import TrainError
from invrl.train.packing import Row
from invrl.types import GrammarSpan, TrainSample

if TYPE_CHECKING:
    import xgrammar


class GrammarMasks:
    """Of one model folder. XGrammar and the tokenizer are loaded when the first grammar comes."""

    def __init__(self, model_path: Path | str, vocab_size: int) -> None:
        self._model_path, self._vocab_size = Path(model_path), vocab_size

    def rows(self, samples: Iterable[TrainSample]) -> list[Row]:
        """One row per sample: the trained tokens are wanted, each from the tokens that its grammar kept.
        TrainError for a token that its grammar does not allow."""
        masks: dict[bytes, bytes] = {}
        rows: list[Row] = []
        for sample in samples:
            wanted_N = np.flatnonzero(sample.loss_mask_T)
            kept: dict[int, bytes] = {}
            for span in sample.grammars:
                found = self.kept(span, sample.tokens_T[span.start : span.end])
                kept |= {span.start + at: masks.setdefault(mask, mask) for at, mask in enumerate(found)}
            kept_N = tuple(kept.get(place) for place in wanted_N.tolist()) if kept else ()
            row = Row(
                tokens_T=sample.tokens_T, wanted_N=wanted_N, temperature=sample.temperature, kept_N=kept_N
            )
            rows.append(row)
        return rows

    def kept(self, span: GrammarSpan, ids_T: NDArray[np.int32]) -> list[bytes]:
        """Of each of the ids, all sampled under the span's grammar: one bit per token of the vocabulary, the
        lowest first. TrainError for an id that the grammar does not allow."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled(span.grammar))
        bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        size = -(-self._vocab_size // 8)
        found: list[bytes] = []
        for at, token in enumerate(ids_T.tolist()):
            matcher.fill_next_token_bitmask(bitmask)
            found.append(bitmask.numpy().tobytes()[:size])
            if not matcher.accept_token(token):
                place = f"token {token} at {at} of {len(ids_T)}"
                reason = f"{place} is not allowed by the grammar that it was sampled under"
                raise TrainError(f"{reason} (xgrammar {version('xgrammar')}): {span.grammar[:200]}")
        return found

    def _compiled(self, grammar: str) -> "xgrammar.CompiledGrammar":
        """The compiler keeps what it has compiled."""
        asked: dict[str, str] = json.loads(grammar)
        if "json_schema" in asked:
            return self._compiler.compile_json_schema(asked["json_schema"], any_whitespace=True)
        return self._compiler.compile_grammar(asked["ebnf"])

    @cached_property
    def _compiler(self) -> "xgrammar.GrammarCompiler":
        """As SGLang makes its own: the model's end tokens end a reply."""
        import xgrammar
        from transformers import AutoTokenizer

        info = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(self._model_path),
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self._end_ids()) or None,
        )
        return xgrammar.GrammarCompiler(info)

    def _end_ids(self) -> set[int]:
        found: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            file = self._model_path / name
            settings: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
            named = settings.get("eos_token_id")
            found |= {each for each in (named if isinstance(named, list) else [named]) if each is not None}
        return found
