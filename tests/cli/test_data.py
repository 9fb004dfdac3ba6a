"""data inspect and data verify through the command line; data prepare is with the verbs of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.store.home import Home
from tests.conftest import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    lines = [json.dumps({"body": f"a line of text number {number} " * (number % 7 + 1)}) for number in range(100)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    ran = cli(
        "data", "prepare", str(tmp_path / "text.jsonl"), "--key", "body", "--tokenizer", "300", "--shuffle", "--json"
    )
    assert ran.code == 0, ran.err
    return Path(ran.json["folder"])


def test_inspect(cli: Cli, folder: Path) -> None:
    ran = cli("data", "inspect", str(folder), "--sequence", "64", "--show", "1", "--json")
    train, held_out = ran.json["splits"]
    assert train["documents"] + held_out["documents"] == 100
    assert train["longest"] > train["median_length"] > 1
    stream, whole = ran.json["packing"]
    assert whole["cut_fraction"] < stream["cut_fraction"]
    assert 0 <= whole["padding_fraction"] < 0.5
    text = cli("data", "inspect", str(folder), "--sequence", "64", "--show", "2").out
    assert "document 1" in text and "a line of text number" in text
    assert "made from source" in text and "shuffle True" in text
    assert cli("data", "inspect", str(folder), "--quiet").out.strip() == str(folder)


def test_verify_names_the_bad_file(cli: Cli, folder: Path, home: Home) -> None:
    ran = cli("data", "verify", str(folder))
    assert ran.code == 0 and "is whole" in ran.out
    assert cli("data", "verify", folder.as_uri(), "--json").json["whole"] is True  # as a store
    bad = folder / "train/00000.bin"
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    ran = cli("data", "verify", str(folder))
    assert ran.code == 2
    assert ran.err == f"error: {bad} is corrupt (its checksum differs from the index); prepare the data again\n"
    bad.unlink()
    ran = cli("data", "inspect", str(folder))
    assert (ran.code, ran.err) == (2, f"error: {bad} is missing; prepare the data again\n")


def test_bad_input(cli: Cli, tmp_path: Path) -> None:
    ran = cli("data", "inspect", str(tmp_path))
    assert ran.code == 2 and ran.err.startswith(f"error: no token data in {tmp_path}; make it with")
    assert cli("data", "inspect", str(tmp_path), "--sequence", "0").code == 2
    ran = cli("data", "verify", "nosuch://bucket/data")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "nosuch://bucket/data" in ran.err
