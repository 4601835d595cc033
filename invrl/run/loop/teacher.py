"""A teacher on an SGLang server, which scores the samples of each batch over HTTP.

A request has a sample's ids up to its last trained token and asks for the log-probs
from its first one on (`logprob_start_len`), without generating. SGLang computes these
from the raw logits: at temperature 1, over the whole vocabulary. The rollouts must
therefore be sampled at temperature 1, and without a grammar.

Invariants: every wait has a deadline; no message contains the key.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from invrl.algorithms.objectives.objectives import TEACHER_COLUMN
from invrl.errors import ConfigError, DeadlineError, ServerError
from invrl.host.network.http_connection import HttpConnections, HttpError
from invrl.host.processes.environment_keys import TEACHER_KEY, held_key
from invrl.run.settings.config import Config
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.tasks import Json

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE_S = 1.0
"""Seconds before the second attempt; twice that before the third."""
_IDLE_CONNECTION_S = 2.0
"""Below the 5 s after which SGLang closes a connection."""
_CHECK_TIMEOUT_S = 60.0
_TEXTS_PER_REQUEST = 4096
_FIELD = "teacher.url"


class Teacher:
    """Client of one teacher server. It connects at the first call."""

    def __init__(
        self, url: str, *, key: str, timeout_s: float, concurrency: int
    ) -> None:
        """`timeout_s`: for each attempt at one sample. `concurrency`: samples in
        flight."""
        self._url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._concurrency = concurrency

    async def check(self, tokenizer: Tokenizer) -> str:
        """Ask for the name of its model, and for the ids of each of our tokens' texts.
        Raises ConfigError if the server does not answer, refuses our key, or tokenizes
        differently."""
        http = HttpConnections(self._url, idle_s=_IDLE_CONNECTION_S)
        try:
            model = await self._ask(http, "/model_info", None, _CHECK_TIMEOUT_S)
            await self._check_tokens(http, tokenizer)
        except (ServerError, DeadlineError) as error:
            fix = f"start the SGLang server with the teacher first; its --api-key is {TEACHER_KEY} here"
            raise ConfigError(_FIELD, self._url, str(error), fix) from error
        finally:
            http.close()
        return str(model.get("model_path", "a model"))

    async def _check_tokens(self, http: HttpConnections, tokenizer: Tokenizer) -> None:
        ids = sorted(tokenizer.get_vocab().values())
        texts = tokenizer.decode_batch(
            [[token_id] for token_id in ids], skip_special_tokens=False
        )
        # no parts of characters
        whole = sorted({text for text in texts if text and "\ufffd" not in text})
        for start in range(0, len(whole), _TEXTS_PER_REQUEST):
            part = whole[start : start + _TEXTS_PER_REQUEST]
            body: dict[str, Json] = {"prompt": list(part), "add_special_tokens": False}
            reply = await self._ask(http, "/v1/tokenize", body, _CHECK_TIMEOUT_S)
            theirs = reply.get("tokens")
            ours = [
                encoding.ids
                for encoding in tokenizer.encode_batch(part, add_special_tokens=False)
            ]
            if not isinstance(theirs, list) or len(theirs) != len(ours):
                raise ServerError(
                    f"{self._url} answered /v1/tokenize with something else than ids of {len(part)} texts"
                )
            for text, our_ids, their_ids in zip(part, ours, theirs, strict=True):
                if our_ids != their_ids:
                    reason = f"its tokens are others: {text!r} is {their_ids} there and {our_ids} here"
                    fix = "use a teacher with the tokenizer of --model-path (the same model family)"
                    raise ConfigError(_FIELD, self._url, reason, fix)

    async def score(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the column `teacher`: log-probs in nats of each
        sample's trained tokens, 0 elsewhere.

        A sample is sent up to three times. Raises ConfigError for samples that the
        teacher would score under another distribution than the student's, ServerError
        or DeadlineError if it cannot score one.
        """
        for sample in batch.samples:
            _check_comparable(sample)
        http = HttpConnections(self._url, idle_s=_IDLE_CONNECTION_S)
        free = asyncio.Semaphore(self._concurrency)

        async def scored(sample: TrainSample) -> TrainSample:
            async with free:
                teacher_T = await self._score_sample(http, sample)
            return replace(
                sample, columns={**sample.columns, TEACHER_COLUMN: teacher_T}
            )

        try:
            async with asyncio.TaskGroup() as group:
                samples = [
                    group.create_task(scored(sample)) for sample in batch.samples
                ]
        except* (ServerError, DeadlineError) as errors:
            raise errors.exceptions[0] from None
        finally:
            http.close()
        return replace(batch, samples=tuple(sample.result() for sample in samples))

    async def _score_sample(
        self, http: HttpConnections, sample: TrainSample
    ) -> NDArray[np.float32]:
        teacher_T = np.zeros(len(sample.tokens_T), np.float32)
        trained = np.flatnonzero(sample.loss_mask_T)
        if not len(trained):
            return teacher_T
        first, last = int(trained[0]), int(trained[-1])
        ids = sample.tokens_T[: last + 1].tolist()
        body: dict[str, Json] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": first
            - 1,  # the entry of that token itself has no log-prob
        }
        reply = await self._ask_again(http, "/generate", body)
        scores_N = self._logprobs(reply, ids[first:])
        teacher_T[first : last + 1] = np.where(
            sample.loss_mask_T[first : last + 1], scores_N, 0.0
        )
        return teacher_T

    async def _ask_again(
        self, http: HttpConnections, path: str, body: Mapping[str, Json]
    ) -> dict[str, Json]:
        """Send a request as `_ask` does, up to three times, with pauses."""
        for attempt in range(1, _ATTEMPTS):
            try:
                return await self._ask(http, path, body, self._timeout_s)
            except (ServerError, DeadlineError) as error:
                logger.warning("%s; it is asked again", error)
                await asyncio.sleep(_PAUSE_S * attempt)
        return await self._ask(http, path, body, self._timeout_s)

    def _logprobs(
        self, reply: Mapping[str, Json], ids: Sequence[int]
    ) -> NDArray[np.float32]:
        """Return the log-probs [N] of exactly these ids. Raises ServerError."""
        meta = reply.get("meta_info")
        entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
        if not isinstance(entries, list) or len(entries) != len(ids) + 1:
            count = len(entries) - 1 if isinstance(entries, list) else "no"
            raise ServerError(
                f"the teacher at {self._url} scored {count} tokens of a sample, not {len(ids)}"
            )
        logprobs: list[float] = []
        for token_id, entry in zip(ids, entries[1:], strict=True):
            logprob, their_id, *_ = entry if isinstance(entry, list) else (None, None)
            # SGLang reports the last id of its vocabulary as 0, with that id's
            # log-prob.
            if their_id not in (token_id, 0) or not isinstance(logprob, int | float):
                raise ServerError(
                    f"the teacher at {self._url} scored token {their_id} with {logprob} in the place of "
                    f"token {token_id}: its vocabulary is another one"
                )
            logprobs.append(logprob)
        return np.array(logprobs, np.float32)

    async def _ask(
        self,
        http: HttpConnections,
        path: str,
        body: Mapping[str, Json] | None,
        timeout_s: float,
    ) -> dict[str, Json]:
        """Return the response's JSON object. POST with a body, GET without."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        method = "GET" if body is None else "POST"
        data = b"" if body is None else json.dumps(body).encode()
        name = f"the teacher at {self._url}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                http.request(method, path, headers, data) as response,
            ):
                content = await response.read()
                status = response.status
        except TimeoutError:
            raise DeadlineError(f"{name} to answer {path}", timeout_s) from None
        except HttpError as error:
            raise ServerError(f"{name} does not answer {path}: {error}") from error
        if status != 200:
            raise ServerError(
                f"{name} answered {path} with {status}: {content[:300].decode(errors='replace')}"
            )
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise ServerError(
                f"{name} answered {path} with something else than a JSON object"
            )
        return reply


def open_teacher(config: Config) -> Teacher | None:
    """Return the teacher on a server; None if the run has none."""
    teacher = config.algorithm.teacher
    if teacher is None or teacher.url is None:
        return None
    return Teacher(
        teacher.url,
        key=held_key(TEACHER_KEY) or "",
        timeout_s=teacher.timeout_s,
        concurrency=teacher.concurrency,
    )


def _check_comparable(sample: TrainSample) -> None:
    """Raise ConfigError for a sample whose student distribution is not the model's
    own."""
    fix = "leave it out of the agent's requests, or use --teacher.model-path, whose log-probs follow the sample's"
    if sample.temperature != 1.0 and sample.loss_mask_T.any():
        sampled = f"rollout {sample.rollout_id} was sampled at temperature {sample.temperature:g}"
        reason = f"{sampled}, and SGLang scores at temperature 1"
        raise ConfigError(_FIELD, "(not shown)", reason, fix)
    if sample.grammars:
        reason = f"a grammar constrained rollout {sample.rollout_id}; SGLang scores over the whole vocabulary"
        raise ConfigError(_FIELD, "(not shown)", reason, fix)
