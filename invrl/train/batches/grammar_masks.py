"""Tokens that a grammar let the engine sample, recomputed from the grammar and the
sampled ids.

An engine under a grammar samples from the softmax over the tokens that the grammar
allows at that position, and returns the log-probs of that distribution. A grammar is
deterministic: XGrammar with the same grammar, tokenizer and ids allows the same tokens
here as in the engine. So a sample carries the grammar's text, not a set of tokens per
position.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from invrl.errors import TrainError
from invrl.train.batches.micro_batch import TokenSequence, replayed_experts
from invrl.types.batches import GrammarSpan, TrainSample

if TYPE_CHECKING:
    import xgrammar


class GrammarMasks:
    """Masks of one model folder. XGrammar and the tokenizer are loaded with the first
    grammar."""

    def __init__(self, model_path: Path | str, vocab_size: int) -> None:
        self._model_path = Path(model_path)
        self._vocab_size = vocab_size

    def sequences(self, samples: Iterable[TrainSample]) -> list[TokenSequence]:
        """Make one sequence per sample: its trained tokens are wanted, each among the
        tokens that its grammar allowed.

        Raises TrainError for a token that its grammar does not allow.
        """
        sequences: list[TokenSequence] = []
        shared_masks: dict[bytes, bytes] = {}  # equal masks are one object
        for sample in samples:
            wanted_N = np.flatnonzero(sample.loss_mask_T)
            mask_by_position: dict[int, bytes] = {}
            for span in sample.grammars:
                masks = self.allowed(span, sample.tokens_T[span.start : span.end])
                for position, mask in enumerate(masks, start=span.start):
                    mask_by_position[position] = shared_masks.setdefault(mask, mask)
            allowed_N: tuple[bytes | None, ...] = ()
            if mask_by_position:
                allowed_N = tuple(
                    mask_by_position.get(position) for position in wanted_N.tolist()
                )
            candidates_NK = None
            if sample.top_logprobs is not None:
                candidates_NK = sample.top_logprobs.ids_TK[wanted_N]
            sequence = TokenSequence(
                tokens_T=sample.tokens_T,
                wanted_N=wanted_N,
                temperature=sample.temperature,
                allowed_N=allowed_N,
                experts_TLK=replayed_experts(sample),
                candidates_NK=candidates_NK,
            )
            sequences.append(sequence)
        return sequences

    def allowed(self, span: GrammarSpan, ids_T: NDArray[np.int32]) -> list[bytes]:
        """Return, for each of the ids, all sampled under the span's grammar, the
        allowed tokens: one bit per token of the vocabulary, the lowest bit first.

        Raises TrainError for an id that the grammar does not allow.
        """
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled(span.grammar))
        bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        num_bytes = -(-self._vocab_size // 8)  # rounded up
        masks: list[bytes] = []
        for position, token in enumerate(ids_T.tolist()):
            matcher.fill_next_token_bitmask(bitmask)
            masks.append(bitmask.numpy().tobytes()[:num_bytes])
            if not matcher.accept_token(token):
                raise TrainError(
                    f"token {token} at {position} of {len(ids_T)} is not allowed by the grammar that it was "
                    f"sampled under (xgrammar {version('xgrammar')}): {span.grammar[:200]}"
                )
        return masks

    def _compiled(self, grammar: str) -> "xgrammar.CompiledGrammar":
        """Compile a grammar. The compiler caches its results."""
        sampling_parameter: dict[str, str] = json.loads(grammar)
        if "json_schema" in sampling_parameter:
            schema = sampling_parameter["json_schema"]
            return self._compiler.compile_json_schema(schema, any_whitespace=True)
        return self._compiler.compile_grammar(sampling_parameter["ebnf"])

    @cached_property
    def _compiler(self) -> "xgrammar.GrammarCompiler":
        """Compiler built like SGLang's: the model's end tokens end a reply."""
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(self._model_path),
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self._end_ids()) or None,
        )
        return xgrammar.GrammarCompiler(tokenizer_info)

    def _end_ids(self) -> set[int]:
        """Return the end tokens that the model folder names."""
        end_ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            file = self._model_path / name
            if not file.exists():
                continue
            settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            named = settings.get("eos_token_id")
            if isinstance(named, list):
                end_ids.update(token for token in named if token is not None)
            elif named is not None:
                end_ids.add(named)
        return end_ids
