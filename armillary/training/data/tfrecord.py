"""TFRecord files without TensorFlow: records with checksums, each a serialised tf.train.Example.

A record is its length (uint64), the masked CRC-32C of the length, the bytes, and the masked CRC-32C of the bytes, all
little-endian (tensorflow/core/lib/io/record_writer.h). An Example maps names to lists of bytes, floats or integers
(tensorflow/core/example/feature.proto).
"""

import struct
from collections.abc import Iterator
from typing import IO

from armillary.errors import BadData

LARGEST = 1 << 30
"""bytes of a record; a longer one is a broken length"""
Fields = Iterator[tuple[int, int | bytes]]


def _table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ 0x82F63B78 if value & 1 else value >> 1
        rows.append(value)
    return tuple(rows)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), as RFC 3720 appendix B.4 has it."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """As it is stored: rotated right by 15 bits, plus a constant."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(file: IO[bytes], where: str) -> Iterator[bytes]:
    """The bytes of each record; BadData where one is cut off or a checksum does not match."""
    number = 0
    while head := file.read(12):
        number += 1
        at = f"record {number} of {where}"
        length, stored = _head(head, at)
        if masked(crc32c(head[:8])) != stored or length > LARGEST:
            raise BadData(f"{at} has a wrong checksum of its length; is it a TFRecord file? copy it again")
        data, end = file.read(length), file.read(4)
        if len(data) < length or len(end) < 4:
            raise BadData(f"{at} is cut off; copy the file again")
        if masked(crc32c(data)) != struct.unpack("<I", end)[0]:
            raise BadData(f"{at} does not match its checksum; copy the file again")
        yield data


def _head(head: bytes, at: str) -> tuple[int, int]:
    if len(head) < 12:
        raise BadData(f"{at} is cut off; copy the file again")
    length, stored = struct.unpack("<QI", head)
    return length, stored


def example(data: bytes, where: str) -> dict[str, list[bytes] | list[int]]:
    """Features of an Example: lists of bytes or of integers; floats are left out."""
    features: dict[str, list[bytes] | list[int]] = {}
    try:
        for message in _messages(data, 1):
            for entry in _messages(message, 1):
                parts = dict(_fields(entry))
                name, value = parts.get(1, b""), parts.get(2, b"")
                if isinstance(name, bytes) and isinstance(value, bytes) and (values := _values(value)):
                    features[name.decode()] = values
    except (ValueError, IndexError):
        raise BadData(f"{where} is no tf.train.Example; write such records, or convert them to .jsonl") from None
    return features


def _values(feature: bytes) -> list[bytes] | list[int]:
    for kind, value in _fields(feature):
        if kind == 1 and isinstance(value, bytes):
            return [item for _, item in _fields(value) if isinstance(item, bytes)]
        if kind == 3 and isinstance(value, bytes):
            return [number for _, item in _fields(value) for number in _integers(item)]
    return []


def _integers(item: int | bytes) -> Iterator[int]:
    """One integer, or a packed list of them; 64 bits in two's complement."""
    if isinstance(item, int):
        item = _varint_bytes(item)
    at = 0
    while at < len(item):
        value, at = _varint(item, at)
        yield value - (1 << 64) if value >> 63 else value


def _varint_bytes(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


# --- protocol buffers: tag, then a varint or that many bytes


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    return (value for field, value in _fields(data) if field == number and isinstance(value, bytes))


def _fields(data: bytes) -> Fields:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size, at = (8 if kind == 1 else 4, at) if kind in (1, 5) else _varint(data, at)
        if kind not in (1, 2, 5) or at + size > len(data):
            raise ValueError("no protocol buffer")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise ValueError("no varint")
