"""Reads the header of a GGUF file as a stream, to learn the architecture before
anything is loaded.

The header is little-endian and has the same layout in versions 2 and 3 of the
specification (docs/gguf.md in the ggml repository): the magic number, the version, the
number of tensors, the number of entries, and the entries. Each entry is a key, the type
of its value, and the value."""

import struct
from typing import IO

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The size of each type that is a number or a boolean."""
_MAX_STRING_BYTES = 2**16
"""A longer key or architecture means that the header is damaged."""
_CHUNK_BYTES = 2**20


def read_architecture(file: IO[bytes]) -> str:
    """The value of the entry `general.architecture`, such as "llama". Raises
    ValueError, with the reason, for a file that is not a GGUF file, ends within its
    header or does not have this entry."""
    if _read_bytes(file, 4) != _MAGIC:
        raise ValueError("it is not a GGUF file")
    version = _read_uint32(file)
    if version not in _VERSIONS:
        raise ValueError(f"its GGUF version is {version}, and 2 and 3 are read")
    _read_uint64(file)  # the number of tensors
    num_entries = _read_uint64(file)
    for _ in range(num_entries):
        key = _read_string(file)
        value_type = _read_uint32(file)
        if key == "general.architecture" and value_type == _STRING:
            return _read_string(file)
        _skip_value(file, value_type)
    raise ValueError("it does not name its architecture (general.architecture)")


def _skip_value(file: IO[bytes], value_type: int) -> None:
    if value_type == _STRING:
        num_bytes = _read_uint64(file)
        _skip_bytes(file, num_bytes)
    elif value_type == _ARRAY:
        _skip_array(file)
    elif value_type in _NUMBER_BYTES:
        _skip_bytes(file, _NUMBER_BYTES[value_type])
    else:
        raise ValueError(
            f"its header is damaged: there is no value of type {value_type}"
        )


def _skip_array(file: IO[bytes]) -> None:
    element_type = _read_uint32(file)
    num_elements = _read_uint64(file)
    if element_type in _NUMBER_BYTES:
        _skip_bytes(file, num_elements * _NUMBER_BYTES[element_type])
        return
    for _ in range(num_elements):
        _skip_value(file, element_type)


def _read_uint32(file: IO[bytes]) -> int:
    (number,) = struct.unpack("<I", _read_bytes(file, 4))
    return number


def _read_uint64(file: IO[bytes]) -> int:
    (number,) = struct.unpack("<Q", _read_bytes(file, 8))
    return number


def _read_string(file: IO[bytes]) -> str:
    num_bytes = _read_uint64(file)
    if num_bytes > _MAX_STRING_BYTES:
        raise ValueError(f"its header is damaged: a string of {num_bytes} bytes")
    return _read_bytes(file, num_bytes).decode(errors="replace")


def _read_bytes(file: IO[bytes], num_bytes: int) -> bytes:
    content = file.read(num_bytes)
    if len(content) < num_bytes:
        raise ValueError("it ends within its header")
    return content


def _skip_bytes(file: IO[bytes], num_bytes: int) -> None:
    """Reads the bytes and drops them: a file within an archive has no faster way to
    skip."""
    while num_bytes > 0:
        chunk = _read_bytes(file, min(num_bytes, _CHUNK_BYTES))
        num_bytes -= len(chunk)
