"""Headers of safetensors files: those of the package are read, others end in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from armillary.errors import BadModel
from armillary.store.safetensors_header import parse_entries, read_entries

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def test_entries_are_where_the_package_wrote_them(tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.safetensors", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5).half()}
    save_file(tensors, path, metadata={"format": "pt"})
    content, entries = path.read_bytes(), read_entries(path)
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (5,)),
    }
    for name, entry in entries.items():
        raw = torch.frombuffer(bytearray(content[entry.begin : entry.begin + entry.nbytes]), dtype=tensors[name].dtype)
        assert torch.equal(raw.view(entry.shape), tensors[name])


def parsed(header: Any) -> Any:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text
    return parse_entries(lambda begin, size: content[begin : begin + size], "m.safetensors")


@pytest.mark.parametrize(
    "change",
    [{"shape": shape} for shape in ([-2, 3], [2.0, 3], [True], "23", None, 5, [10**400], [2**40, 2**40], [1] * 2000)]
    + [{"data_offsets": at} for at in ([-8, 16], [24, 0], [0], [0, 24, 48], None, "ab", [0, 10**400], [0, 2**63])]
    + [{"dtype": dtype} for dtype in (5, None, ["F32"])],
)
def test_entries_that_make_no_sense(change: dict[str, Any]) -> None:
    assert parsed({"a": GOOD})["a"].nbytes == 24
    with pytest.raises(BadModel, match=r"truncated or not safetensors \(.{1,200}\); fetch it again$"):
        parsed({"a": GOOD | change})


@pytest.mark.parametrize("header", [[], None, 5, {"a": 5}, {"a": []}, b"", b"{", b"\xff", b'{"a":' * 100_000])
def test_headers_that_are_no_tables(header: Any) -> None:
    with pytest.raises(BadModel, match="truncated or not safetensors"):
        parsed(header)


def test_sizes_that_no_header_has(tmp_path: Path) -> None:
    for content in (b"", b"1234", struct.pack("<Q", 2**63), struct.pack("<Q", 10**8 + 1) + b"{}"):
        (path := tmp_path / "m.safetensors").write_bytes(content)
        with pytest.raises(BadModel, match="truncated or not safetensors"):
            read_entries(path)
