"""The container of torch.save around one tensor, as bytes before and after the tensor's own: a file that is laid out
ahead is filled with data only, and torch still reads it.
"""

import io
import struct
import zipfile
from functools import lru_cache
from typing import NamedTuple

import torch

_LOCAL, _ENTRY = struct.Struct("<26xHH"), struct.Struct("<16xI8xHHH12x")
"""of a zip file: lengths in the header before a member, and checksum and lengths in its directory entry"""


class Container(NamedTuple):
    """`head`, the tensor's bytes, `tail`. The member's CRC-32 is at `crc_at` in the tail, twice."""

    head: bytes
    tail: bytes
    crc_at: tuple[int, int]


@lru_cache(maxsize=4096)
def container(sizes: tuple[int, ...], dtype: torch.dtype) -> Container:
    """For a contiguous tensor of this shape."""
    file, tensor = io.BytesIO(), torch.empty(sizes, dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(tensor, file)
    content = file.getbuffer()
    with zipfile.ZipFile(file) as archive:
        (member,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
        directory = archive.start_dir
    name, extra = _LOCAL.unpack_from(content, member.header_offset)
    begin = member.header_offset + _LOCAL.size + name + extra
    end = begin + tensor.nbytes
    assert bytes(content[end : end + 4]) == b"PK\x07\x08", "torch writes a data descriptor after a member"
    entry = _entry(content, directory, member.filename.encode())
    return Container(bytes(content[:begin]), bytes(content[end:]), (4, entry + 16 - end))


def _entry(content: memoryview, at: int, wanted: bytes) -> int:
    """Position of a member's entry in the directory."""
    while True:
        _, name, extra, comment = _ENTRY.unpack_from(content, at)
        begin = at + _ENTRY.size
        if bytes(content[begin : begin + name]) == wanted:
            return at
        at = begin + name + extra + comment
