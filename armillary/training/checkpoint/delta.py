"""Deltas: the bytes of a tensor as a difference to its bytes in an earlier checkpoint, without loss.

The bytes of numbers are split into planes (all first bytes, all second bytes …), because sign and exponent change far
less than the low bits of the mantissa. Each plane is stored in the way that a sample of it says is smallest: as it is,
compressed, or compressed after XOR with the earlier bytes. Needs numpy and zstandard only.

    item    number of pieces, length of each, the pieces (little endian, 32 bits)
    piece   per plane its mode (one byte) and length (32 bits); then the planes
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

PIECE = 4 << 20
"""bytes of a tensor that are encoded together"""
_PLAIN, _COMPRESSED, _XORED = 0, 1, 2
_SAMPLE, _WORTH = 1 << 14, 0.97
"""bytes of a plane that are tried, and the size, as a share of it, below which compressing is worth its time"""
_LEVEL = 1
_PLANE, _LENGTH = struct.Struct("<BI"), struct.Struct("<I")

Array = np.ndarray[Any, np.dtype[np.uint8]]
Read = Callable[[int, int], bytes]
"""(begin, end) -> these bytes of the earlier tensor"""


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of a tensor of so many bytes."""
    for begin in range(0, size, PIECE):
        yield begin, min(size, begin + PIECE)


def join(encoded: list[bytes]) -> bytes:
    """An item from its pieces."""
    lengths = b"".join(_LENGTH.pack(len(piece)) for piece in encoded)
    return _LENGTH.pack(len(encoded)) + lengths + b"".join(encoded)


def encode(raw: bytes | memoryview, base: bytes, width: int) -> bytes:
    """A piece of numbers of `width` bytes each."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    planes, before = _planes(raw, width), _planes(base, width)
    heads, bodies = [], []
    for plane, earlier in zip(planes, before, strict=True):
        mode = _mode(plane, earlier, compressor)
        body = _body(mode, plane, earlier, compressor)
        heads.append(_PLANE.pack(mode, len(body)))
        bodies.append(body)
    return b"".join(heads + bodies)


def decode(item: bytes, base: Read, size: int, width: int) -> bytearray:
    """All bytes of a tensor from its item."""
    (count,) = _LENGTH.unpack_from(item)
    lengths = [_LENGTH.unpack_from(item, 4 + 4 * number)[0] for number in range(count)]
    at, result = 4 + 4 * count, bytearray(size)
    for (begin, end), length in zip(pieces(size), lengths, strict=True):
        result[begin:end] = _decode_piece(item[at : at + length], base(begin, end), width)
        at += length
    return result


def _decode_piece(piece: bytes, base: bytes, width: int) -> bytes:
    import zstandard

    before = _planes(base, width)
    at = _PLANE.size * width
    result: Array = np.empty((len(base) // width, width), dtype=np.uint8)
    for number in range(width):
        mode, length = _PLANE.unpack_from(piece, _PLANE.size * number)
        body = piece[at : at + length]
        if mode != _PLAIN:
            body = zstandard.ZstdDecompressor().decompress(body, max_output_size=len(result))
        plane = np.frombuffer(body, dtype=np.uint8)
        result[:, number] = plane ^ before[number] if mode == _XORED else plane
        at += length
    return result.tobytes()


def _planes(raw: bytes | memoryview, width: int) -> Array:
    """[width, numbers]: the first bytes of all numbers, then the second ones …"""
    return np.ascontiguousarray(np.frombuffer(raw, dtype=np.uint8).reshape(-1, width).T)


def _mode(plane: Array, earlier: Array, compressor: Any) -> int:
    """By the size of a sample from the middle."""
    begin = max(0, (len(plane) - _SAMPLE) // 2)
    sample, earlier_sample = plane[begin : begin + _SAMPLE], earlier[begin : begin + _SAMPLE]
    sizes = {
        _PLAIN: _WORTH * len(sample),
        _COMPRESSED: len(compressor.compress(sample.tobytes())),
        _XORED: len(compressor.compress((sample ^ earlier_sample).tobytes())),
    }
    return min(sizes, key=lambda mode: sizes[mode])


def _body(mode: int, plane: Array, earlier: Array, compressor: Any) -> bytes:
    if mode == _PLAIN:
        return plane.tobytes()
    result: bytes = compressor.compress((plane ^ earlier if mode == _XORED else plane).tobytes())
    return result
