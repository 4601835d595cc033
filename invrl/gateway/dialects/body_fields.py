"""Fields of a request's body: a table per dialect, and the handling of all other
fields. Pure.

A field is honoured, refused or ignored:
- honoured: the dialect's structures have it.
- refused: with it, the answer would have to be another one that the gateway cannot
  give. These are the fields of the API that are not supported, and in every dialect the
  sampling parameters that other servers add (`SAMPLING_EXTENSIONS`). A value that asks
  for nothing (null, false, 0, empty) is accepted. A name that looks like a misspelt
  sampling parameter is refused as well.
- ignored: everything else, up to `_MAX_UNKNOWN_FIELDS` fields of a body. Its name is
  reported to the gateway's operator (`GET /sessions/ID`, and once in the log), unless
  our own answers carry it: clients send answers back as they got them.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from invrl.errors import SessionError

SAMPLING_EXTENSIONS: Mapping[str, Sequence[Any]] = {
    "min_tokens": (),
    "min_new_tokens": (),
    "ignore_eos": (),
    "stop_token_ids": (),
    "stop_regex": (),
    "include_stop_str_in_output": (),
    "no_stop_trim": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "top_a": (),
    "top_n_sigma": (),
    "mirostat": (),
    "mirostat_mode": (),
    "dry_multiplier": (),
    "xtc_probability": (),
    "dynatemp_range": (),
    "use_beam_search": (),
    "early_stopping": (),
    "do_sample": (True,),
    "typical_p": (1,),
    "tfs": (1,),
    "tfs_z": (1,),
    "length_penalty": (1,),
    "num_beams": (1,),
    "beam_width": (1,),
    "n": (1,),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "continue_final_message": (),
    "echo": (),
    "prefix": (),
    "chat_template": (),
    "documents": (),
    "input_ids": (),
    "input_embeds": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "lora_path": (),
    "lora_request": (),
    "session_params": (),
    "transforms": (),
    "plugins": (),
}
"""Sampling parameters that servers of open models accept in addition to OpenAI's, and
their fields that change the prompt. The values are those, besides falsy ones, that
request the default behaviour."""
_SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "seed",
    "stop",
    "stop_sequences",
)
"""Sampling parameters of any API. A dialect refuses those that it lacks."""
_MISSPELT_SIMILARITY = 0.87
"""Similarity from which two names are a name and its misspelling. (`models` and `model`
are more similar; `model` is no sampling parameter, so they are not compared.)"""
_NOT_MISSPELT = ("speed",)
"""Fields of some API that look like a misspelt sampling parameter. None of them affects
sampling."""
_MAX_UNKNOWN_FIELDS = 256
"""Maximum number of unknown fields of one body. Each of them is compared with all
`_SAMPLING_NAMES` in the event loop: a body that consists of names would stop every
session for a minute."""
_MAX_IGNORED = 32
"""Maximum number of ignored fields reported per request."""
_MAX_NAME_LENGTH = 64
"""Maximum length of reported names, which are cut. A longer name is not compared with
`_SAMPLING_NAMES`."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """Fields of one dialect's body."""

    body: type[msgspec.Struct]
    """Structure of honoured fields."""
    refused: Mapping[str, Sequence[Any]]
    """Unsupported fields, with the values that ask for nothing."""
    unreported: Sequence[str] = ()
    """Fields that are ignored and not reported: our own answers carry them, or the API
    documents that they do not affect the tokens of an answer."""
    entries: str = ""
    """Field that holds the conversation; "" if there is none."""
    entry: type[msgspec.Struct] | None = None
    """One message, or item, of the conversation. Its fields are honoured."""
    refused_in_entries: Sequence[str] = ()
    """Like `refused`, for messages."""
    unreported_in_entries: Sequence[str] = ()
    """Like `unreported`, for messages."""
    _known: frozenset[str] = field(init=False)
    _known_in_entries: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        known = {*self.body.__struct_encode_fields__, *self.unreported}
        known_in_entries = set(self.unreported_in_entries)
        if self.entry is not None:
            known_in_entries.update(self.entry.__struct_encode_fields__)
        object.__setattr__(self, "_known", frozenset(known))
        object.__setattr__(self, "_known_in_entries", frozenset(known_in_entries))

    def ignored(self, raw: bytes) -> tuple[str, ...]:
        """Return the names of the ignored fields of `raw`, a decoded body; a field of a
        message is `messages[].name`. Raises SessionError 400 for a refused field, or
        for too many unknown fields."""
        fields = _FIELDS.decode(raw)
        unknown = [name for name in fields if name not in self._known]
        if len(unknown) > _MAX_UNKNOWN_FIELDS:
            reason = f"the body has {len(unknown)} fields that are no parameters, {_MAX_UNKNOWN_FIELDS} at most"
            raise SessionError(reason, status=400, code="too_many_fields")
        ignored = [name for name in unknown if self._is_ignored(name, fields[name])]
        entries = bytes(fields.get(self.entries, msgspec.Raw(b"")))
        if entries.startswith(b"["):
            self._add_ignored_in_entries(ignored, entries)
        return tuple(name[:_MAX_NAME_LENGTH] for name in ignored)[:_MAX_IGNORED]

    def _is_ignored(self, name: str, raw: msgspec.Raw) -> bool:
        """Whether to report a field that the body does not have as ignored; False for a
        value that asks for nothing. Raises SessionError 400 if the field is refused."""
        neutral_values = self.refused.get(name)
        if neutral_values is None:
            neutral_values = SAMPLING_EXTENSIONS.get(name)
        if neutral_values is not None:
            value = _decode_value(raw)
            if value and value not in neutral_values:
                raise unsupported(name)
            return False
        if bytes(raw) == b"null":
            return False
        if name in _SAMPLING_NAMES:
            raise unsupported(name)
        if len(name) > _MAX_NAME_LENGTH or name in _NOT_MISSPELT:
            return True
        meant = _misspelt_parameter(name)
        if meant:
            reason = f"`{name}` is no parameter"
            if meant in self._known:
                reason += f"; `{meant}` is"
            raise SessionError(reason, status=400, code="unknown_parameter", param=name)
        return True

    def _add_ignored_in_entries(self, ignored: list[str], entries: bytes) -> None:
        """Add the names of the ignored fields of messages."""
        reported = set(ignored)
        for index, entry in enumerate(_ENTRIES.decode(entries)):
            for name in entry.keys() - self._known_in_entries:
                if name in self.refused_in_entries:
                    if _decode_value(entry[name]):
                        raise unsupported(f"{self.entries}[{index}].{name}")
                    continue
                full_name = f"{self.entries}[].{name}"
                is_new = len(ignored) < _MAX_IGNORED and full_name not in reported
                if is_new and bytes(entry[name]) != b"null":
                    reported.add(full_name)
                    ignored.append(full_name)


def _misspelt_parameter(name: str) -> str:
    """Return the sampling parameter that this name misspells; "" if there is none."""
    matches = difflib.get_close_matches(
        _bare(name), _BARE_NAMES, n=1, cutoff=_MISSPELT_SIMILARITY
    )
    if not matches:
        return ""
    return _BARE_NAMES[matches[0]]


def _bare(name: str) -> str:
    """Normalise a name: `topP` and `top-p` become `topp`, like `top_p`."""
    return name.lower().replace("-", "").replace("_", "")


_BARE_NAMES = {_bare(name): name for name in _SAMPLING_NAMES}


def _decode_value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return True  # the value cannot be read, but it asks for something


def unsupported(name: str) -> SessionError:
    """Return the error for a refused field."""
    reason = f"`{name}` is not supported"
    return SessionError(reason, status=400, code="unsupported_parameter", param=name)
