"""The header of a GGUF file: metadata, and where each tensor is. Read without torch and without trusting it.

Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts; key-value pairs; name, dims, type and offset of
each tensor; padding to the alignment; tensors. Dims are stored innermost first; here they are in row-major order.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from armillary.errors import BadModel, NotFound

KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}
"""supported types of tensors, by their number in a file"""
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""kind: (numbers, bytes) of a block"""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4
_MOST_ITEMS = 1 << 24
"""of the header, values of its arrays and tensors: published ones have half a million, and each takes memory here"""


class GgufTensor(NamedTuple):
    """A tensor in the file."""

    kind: str
    shape: tuple[int, ...]  # row-major
    begin: int  # byte of the file
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What a file holds."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_header(path: Path) -> GgufHeader:
    """BadModel in one line for a file that is cut short or makes no sense."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            metadata, tensors = _parse(_Cursor(content, size))
    except FileNotFoundError:
        raise NotFound(f"no file {path}; check the name") from None
    except (_Malformed, ValueError) as error:
        raise BadModel(f"{path} is truncated or not GGUF ({error}); fetch it again") from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read ({error.strerror}); check its type and permissions") from None
    return GgufHeader(path=path, metadata=metadata, tensors=tensors)


class _Malformed(Exception):
    """Why the bytes are no GGUF header."""


class _Cursor:
    """Numbers and texts of the file, one after the other, never past its end."""

    def __init__(self, content: mmap.mmap, size: int) -> None:
        self._content, self.size, self.at, self._items = content, size, 0, 0

    def take(self, count: int) -> bytes:
        if count < 0 or count > self.size - self.at:
            raise _Malformed(f"{count} bytes at {self.at} of {self.size}")
        self.at += count
        return self._content[self.at - count : self.at]

    def count(self, more: int, what: str) -> None:
        """Items that follow: each takes at least a byte."""
        self._items += more
        if more > self.size - self.at or self._items > _MOST_ITEMS:
            raise _Malformed(f"{more} {what} at {self.at} of {self.size}")

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 2:
            raise _Malformed(f"a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        self.count(count, "items of an array")
        if inner in _SCALARS:
            code = f"{count}{_SCALARS[inner]}"
            return list(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"))))
        return [self.value(inner, depth + 1) for _ in range(count)]


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if cursor.take(4) != b"GGUF":
        raise _Malformed("it does not begin with GGUF")
    if (version := cursor.number("I")) not in (2, 3):
        raise _Malformed(f"version {version}, not 2 or 3")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    cursor.count(num_tensors, "tensors")
    cursor.count(num_values, "values")
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _Malformed(f"an alignment of {alignment}")
    data = -(-cursor.at // alignment) * alignment
    return metadata, _placed(infos, data, cursor.size)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, dims, type, offset)."""
    name, num_dims = cursor.text(), cursor.number("I")
    if num_dims > _MOST_DIMS:
        raise _Malformed(f"tensor {name[:60]!r} has {num_dims} dims")
    dims = tuple(reversed([cursor.number("Q") for _ in range(num_dims)]))
    return name, dims, cursor.number("I"), cursor.number("Q")


def _placed(infos: list[tuple[str, tuple[int, ...], int, int]], data: int, size: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, dims, number, offset in infos:
        kind = KINDS.get(number)
        if kind is None:
            known = ", ".join(KINDS.values())
            raise _Malformed(f"tensor {name[:60]!r} is of type {number}; supported are {known}")
        numbers, block_bytes = BLOCKS[kind]
        if not dims or dims[-1] % numbers or name in tensors:
            raise _Malformed(f"tensor {name[:60]!r} of dims {list(dims)} in blocks of {numbers}")
        nbytes = prod(dims) // numbers * block_bytes
        if not 0 < nbytes <= size - data - offset:
            raise _Malformed(f"tensor {name[:60]!r} of {nbytes} bytes at {data + offset} of {size}")
        tensors[name] = GgufTensor(kind, dims, data + offset, nbytes)
    return tensors
