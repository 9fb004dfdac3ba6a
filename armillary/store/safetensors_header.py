"""The header of a safetensors file: what it holds and where. Read without torch and without trusting it.

Layout (github.com/huggingface/safetensors): eight bytes with the size of the header, the header in JSON, the tensors.
"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from armillary.errors import BadModel

_LARGEST_HEADER = 100_000_000  # the format's own limit
_MOST_DIMS = 16


class TensorEntry(NamedTuple):
    """A tensor of the file."""

    dtype: str  # F32, BF16, I32, F8_E4M3 …
    shape: tuple[int, ...]
    begin: int  # byte of the file
    nbytes: int


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file by name; BadModel in one line for a file that makes no sense."""

    def read(begin: int, size: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(begin)
                return file.read(size)
        except OSError as error:
            raise BadModel(f"{path} cannot be read ({error.strerror}); check its type and permissions") from None

    return parse_entries(read, str(path))


def parse_entries(read: Callable[[int, int], bytes], where: str) -> dict[str, TensorEntry]:
    """The same from `read`, which gives so many bytes from a position on."""
    try:
        size = int.from_bytes(read(0, 8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(read(8, size))
        return {name: _entry(entry, 8 + size) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadModel(f"{where} is truncated or not safetensors ({error}); fetch it again") from None


def _entry(entry: Any, data: int) -> TensorEntry:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or len(shape) > _MOST_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a tensor of dtype {str(dtype)[:20]} and shape {str(shape)[:60]}")
    if not (
        type(begin) is type(end) is int and 0 <= begin <= end < 1 << 63 and prod(shape) <= 8 * (end - begin)
    ):  # numbers of a bit and more
        raise ValueError(f"a tensor of shape {str(shape)[:60]} in bytes {str(begin)[:20]} to {str(end)[:20]}")
    return TensorEntry(dtype, tuple(shape), data + begin, end - begin)
