"""TFRecord: records as TensorFlow writes them, and what a broken file says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from armillary.errors import BadData
from armillary.training.data.readers import Document, reader_of
from armillary.training.data.tfrecord import crc32c, masked


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def example_of(name: str, feature: bytes) -> bytes:
    return field(1, field(1, field(1, name.encode()) + field(2, feature)))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def read(path: Path, key: str = "text") -> list[Document]:
    reader = reader_of(path)
    assert reader is not None
    return [each for each in reader(path, path.name, key) if isinstance(each, Document)]


def test_the_checksum_is_the_published_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "check value of CRC-32C"
    assert crc32c(bytes(32)) == 0x8A9136AA, "RFC 3720, appendix B.4"


def test_texts_and_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    texts = [example_of("text", field(1, field(1, text.encode()))) for text in ("a text", "größer", " ")]
    path.write_bytes(b"".join(map(record, texts)))
    assert [(each.text, each.origin) for each in read(path)] == [("a text", "a.tfrecord:1"), ("größer", "a.tfrecord:2")]
    packed = example_of("ids", field(3, field(1, bytes([5, 0x96, 0x01, 0]))))
    single = example_of("ids", field(3, bytes([8, 7, 8, 0x96, 0x01])))
    path.write_bytes(record(packed) + record(single))
    assert [each.ids for each in read(path, "ids")] == [(5, 150, 0), (7, 150)]
    with pytest.raises(BadData, match="it has ids"):
        read(path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path, good = tmp_path / "a.tfrecords", record(example_of("text", field(1, field(1, b"a text"))))
    for broken, says in (
        (good[:-6] + b"X" + good[-5:], "does not match its checksum"),
        (b"\x01" + good[1:], "wrong checksum of its length"),
        (good + good[:20], "record 2 of .* is cut off"),
        (good[:5], "is cut off"),
        (record(b"\xff\xff\xff"), "no tf.train.Example"),
    ):
        path.write_bytes(broken)
        with pytest.raises(BadData, match=says):
            read(path)
