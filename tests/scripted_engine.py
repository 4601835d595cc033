"""A scripted engine: SGLang's `/generate` with replies that a script writes: what a
small model cannot say.

The script is a function from the prompt's text to the reply's. Its reply is spelt in
ids as no tokenizer would: cut at random places, each piece encoded by itself, special
tokens whole. So whoever makes ids again from text, instead of keeping those that were
sampled, gets others. Ends with the end-of-turn token. LogprobPasses the engine's
contract tests; the real router takes it for an engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web
from fakes import FakeEngine
from tokenizers import Tokenizer

TextScript = Callable[[str], str]
"""The prompt's text, special tokens shown, to the reply's text (without the end of
turn)."""


def text_by_prompt(prompt: str) -> str:
    """Always the same hundred and more tokens to the same prompt."""
    source = random.Random(prompt)
    return " ".join(str(source.randrange(10**6)) for _ in range(40))


class ScriptedEngine(FakeEngine):
    """Use as an async context manager; `url` is where it listens. `model`: folder of
    the tokenizer."""

    def __init__(
        self,
        script: TextScript,
        model: Path,
        *,
        version: int = 0,
        token_delay_s: float = 0.0,
    ) -> None:
        super().__init__(self._say, version=version, token_delay_s=token_delay_s)
        self._text_script = script
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        settings = json.loads((model / "tokenizer_config.json").read_text())
        self.vocab_size = int(
            json.loads((model / "config.json").read_text())["vocab_size"]
        )
        self._end = self._tokenizer.token_to_id(settings["eos_token"])
        added = [
            str(token.content)
            for token in self._tokenizer.get_added_tokens_decoder().values()
        ]
        self._special = re.compile("(" + "|".join(map(re.escape, added)) + ")")

    def spell(self, text: str, seed: str) -> list[int]:
        """Ids that decode to `text`, of an unusual but repeatable spelling."""
        source = random.Random(seed)
        ids: list[int] = []
        for number, part in enumerate(self._special.split(text)):
            at = 0
            while at < len(part):
                end = len(part) if number % 2 else at + source.randint(1, 12)
                ids += self._tokenizer.encode(
                    part[at:end], add_special_tokens=False
                ).ids
                at = end
        assert self.text(ids) == text
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/health_generate", self._health),
            web.get("/server_info", self._info),
            web.get("/get_server_info", self._info),
            web.get("/model_info", self._info),
            web.get("/get_model_info", self._info),
        ]

    async def _info(self, _: web.Request) -> web.Response:
        names = {"model_path": str(self._model), "served_model_name": "scripted"}
        return web.json_response(
            {**names, "weight_version": str(self.version), "is_generation": True}
        )

    def _say(self, prompt: Sequence[int]) -> list[int]:
        text = self.text(prompt)
        return [*self.spell(self._text_script(text), text), self._end]

    def _reply(self, prompt: Sequence[int], params: dict) -> tuple[list[int], dict]:
        reply, finish = super()._reply(prompt, {"stop_token_ids": [], **params})
        stops = [stop] if isinstance(stop := params.get("stop") or [], str) else stop
        for count in range(1, len(reply) + 1) if stops else ():
            text = self.text(reply[:count])
            if found := next((stop for stop in stops if stop in text), None):
                return reply[:count], {"type": "stop", "matched": found}
        return reply, finish
