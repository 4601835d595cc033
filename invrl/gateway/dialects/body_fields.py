"""Which fields of a request's body count: a table per dialect, and what becomes of the others. Pure.

A field is honoured, refused or ignored:
- honoured: it has a place in the dialect's structures.
- refused: the answer would be another one with it, and we cannot give that one: fields of the API that are
  not supported, and every server's extensions of sampling (`SAMPLING_EXTENSIONS`), in every dialect. A value
  that asks for nothing (null, false, 0, empty) is taken. A name that looks like a misspelt sampling parameter
  is refused as well.
- ignored: everything else, up to `_MOST_UNKNOWN` fields of a body. It is named to whoever runs the gateway
  (`GET /sessions/ID`, the log, once), unless our own answers carry it: clients send answers back as they got
  them."""

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
"""What servers of open models take beside OpenAI's fields, and what changes the prompt or the sampling: with
values, beside the falsy ones, that ask for what happens anyway."""
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
"""Of one API or another: refused where it is not the dialect's own."""
_ALIKE = 0.87
"""Names that share so much are one name and its misspelling; `models` and `model` share more, and are not
compared."""
_NOT_MISSPELT = ("speed",)
"""Names of some API's own that look like a misspelt sampling parameter; none of them samples."""
_MOST_UNKNOWN = 256
"""Fields of one body that its dialect does not know. Each is compared with all of `_SAMPLING_NAMES`, in the
event loop: a body of nothing but names would stop every session for a minute."""
_MOST_IGNORED = 32
"""Names that one request may make us keep."""
_LONGEST_NAME = 64
"""Characters of a name that are kept. A longer name is like none of `_SAMPLING_NAMES`."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """The fields of one dialect's body that are not honoured. `refused`, `refused_in_entries`: not
    supported, with the values that ask for nothing. `unsaid`, `unsaid_in_entries`: names that our own answers
    carry, or that the API documents as without effect on the tokens of an answer: not worth a word."""

    body: type[msgspec.Struct]
    refused: Mapping[str, Sequence[Any]]
    unsaid: Sequence[str] = ()
    entries: str = ""
    """The field that holds the conversation; "" for none."""
    entry: type[msgspec.Struct] | None = None
    """Of one message, or item, of the conversation."""
    refused_in_entries: Sequence[str] = ()
    unsaid_in_entries: Sequence[str] = ()
    _known: frozenset[str] = field(init=False)
    _known_in_entries: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        known = {*self.body.__struct_encode_fields__, *self.unsaid}
        of_entry = self.entry.__struct_encode_fields__ if self.entry else ()
        object.__setattr__(self, "_known", frozenset(known))
        object.__setattr__(self, "_known_in_entries", frozenset({*of_entry, *self.unsaid_in_entries}))

    def ignored(self, raw: bytes) -> tuple[str, ...]:
        """Names of the fields of `raw`, a body that has been decoded, that nothing reads; those of messages
        as `messages[].name`. SessionError 400 for a field that is refused, and for too many unknown ones."""
        fields = _FIELDS.decode(raw)
        unknown = [name for name in fields if name not in self._known]
        if len(unknown) > _MOST_UNKNOWN:
            reason = f"the body has {len(unknown)} fields that are no parameters, {_MOST_UNKNOWN} at most"
            raise SessionError(reason, status=400, code="too_many_fields")
        found: dict[str, None] = {}
        for name in unknown:
            if self._is_ignored(name, fields[name]):
                found[name] = None
        entries = bytes(fields.get(self.entries, msgspec.Raw(b"")))
        if entries.startswith(b"["):
            for at, entry in enumerate(_ENTRIES.decode(entries)):
                for name in entry.keys() - self._known_in_entries:
                    if name in self.refused_in_entries:
                        if _value(entry[name]):
                            raise unsupported(f"{self.entries}[{at}].{name}")
                    elif len(found) < _MOST_IGNORED and bytes(entry[name]) != b"null":
                        found[f"{self.entries}[].{name}"] = None
        return tuple(name[:_LONGEST_NAME] for name in found)[:_MOST_IGNORED]

    def _is_ignored(self, name: str, raw: msgspec.Raw) -> bool:
        """False for a value that asks for nothing."""
        neutral = self.refused.get(name)
        if neutral is None:
            neutral = SAMPLING_EXTENSIONS.get(name)
        if neutral is not None:
            value = _value(raw)
            if value and value not in neutral:
                raise unsupported(name)
            return False
        if bytes(raw) == b"null":
            return False
        if name in _SAMPLING_NAMES:
            raise unsupported(name)
        if len(name) > _LONGEST_NAME or name in _NOT_MISSPELT:
            return True
        alike = difflib.get_close_matches(_bare(name), _BARE_NAMES, n=1, cutoff=_ALIKE)
        if alike:
            reason = f"`{name}` is no parameter; `{_BARE_NAMES[alike[0]]}` is"
            raise SessionError(reason, status=400, code="unknown_parameter", param=name)
        return True


def _bare(name: str) -> str:
    """`topP` and `top-p` are `top_p`."""
    return name.lower().replace("-", "").replace("_", "")


_BARE_NAMES = {_bare(name): name for name in _SAMPLING_NAMES}


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return True  # of a shape that nobody reads; it asks for something


def unsupported(name: str) -> SessionError:
    reason = f"`{name}` is not supported"
    return SessionError(reason, status=400, code="unsupported_parameter", param=name)
