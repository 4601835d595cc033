"""The head of a GGUF file, read as a stream: which architecture it holds, before anything is loaded.

Little-endian, as the specification (ggml, docs/gguf.md) has it for versions 2 and 3: the magic number, the
version, how many tensors and how many entries there are, then the entries: a key, a type and a value."""

import struct
from typing import IO

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Of each type that is a number or a boolean."""
_MOST_TEXT = 2**16
"""A key or a name that is longer is damage, not text."""
_PIECE = 2**20


def read_architecture(file: IO[bytes]) -> str:
    """The entry `general.architecture`, such as "llama". ValueError, which says why, for a file that is no
    GGUF, ends too early or does not name it."""
    if _exactly(file, 4) != _MAGIC:
        raise ValueError("it is not a GGUF file")
    version = _unsigned(file, 4)
    if version not in _VERSIONS:
        raise ValueError(f"its GGUF version is {version}, and 2 and 3 are read")
    _unsigned(file, 8)  # how many tensors
    for _ in range(_unsigned(file, 8)):
        key = _text(file)
        kind = _unsigned(file, 4)
        if key == "general.architecture" and kind == _STRING:
            return _text(file)
        _skip_value(file, kind)
    raise ValueError("it does not say which architecture it holds (general.architecture)")


def _skip_value(file: IO[bytes], kind: int) -> None:
    if kind == _STRING:
        _skip(file, _unsigned(file, 8))
    elif kind == _ARRAY:
        element = _unsigned(file, 4)
        count = _unsigned(file, 8)
        if element in _NUMBER_BYTES:
            _skip(file, count * _NUMBER_BYTES[element])
        else:
            for _ in range(count):
                _skip_value(file, element)
    elif kind in _NUMBER_BYTES:
        _skip(file, _NUMBER_BYTES[kind])
    else:
        raise ValueError(f"its head is damaged: there is no value of type {kind}")


def _unsigned(file: IO[bytes], size: int) -> int:
    (number,) = struct.unpack("<I" if size == 4 else "<Q", _exactly(file, size))
    return number


def _text(file: IO[bytes]) -> str:
    size = _unsigned(file, 8)
    if size > _MOST_TEXT:
        raise ValueError(f"its head is damaged: a name of {size} bytes")
    return _exactly(file, size).decode(errors="replace")


def _exactly(file: IO[bytes], size: int) -> bytes:
    read = file.read(size)
    if len(read) < size:
        raise ValueError("it ends within its head")
    return read


def _skip(file: IO[bytes], size: int) -> None:
    """By reading: a file within an archive has no cheaper way."""
    while size > 0:
        size -= len(_exactly(file, min(size, _PIECE)))
