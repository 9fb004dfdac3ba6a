"""File formats as streams of documents."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armillary.errors import BadData, MissingPart
from armillary.training.data import readers
from armillary.training.data.readers import Document, Skipped, read_jsonl, read_parquet, read_text, reader_of


def texts(path: Path, key: str = "text") -> list[str]:
    reader = reader_of(path)
    assert reader is not None
    return [item.text for item in reader(path, path.name, key) if isinstance(item, Document)]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_bytes("\ufeffone\r\n\r\ntwö\n".encode())
    assert list(read_text(path, "a.md", "text")) == [Document(text="one\n\ntwö\n", origin="a.md")]


@pytest.mark.parametrize("content", [b"", b"\n \t\n"])
def test_a_blank_file_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert list(read_text(path, "a.txt", "text")) == []


@pytest.mark.parametrize("content", [b"caf\xe9 au lait", b"MZ\x00\x01", "hé".encode()[:-1]])
def test_what_is_not_utf8_text_is_skipped(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert list(read_text(path, "a.txt", "text")) == [Skipped(origin="a.txt", why="not UTF-8 text")]


def test_a_long_text_is_cut_at_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 20)
    path = tmp_path / "a.txt"
    path.write_text("first para\n\nsecond one\nhas lines\n\n" + "x" * 45)
    found = list(read_text(path, "a.txt", "text"))
    assert [item.text for item in found if isinstance(item, Document)] == [
        "first para\n\n",
        "second one\n",
        "has lines\n\n",
        "x" * 20,
        "x" * 20,
        "x" * 5,
    ]
    assert [item.origin for item in found[:2]] == ["a.txt", "a.txt#1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\ufeff"), min_size=1))
def test_pieces_join_to_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(readers, "PIECE", 7)
    path = tmp_path / "a.txt"
    path.write_text(text + "|", encoding="utf-8")
    assert "".join(texts(path)).replace("\n", "").split() == (text + "|").replace("\n", "").split()
    assert all(len(piece) <= 7 for piece in texts(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    rows = [{"text": "öne"}, {"text": " "}, {"text": "two\nlines", "n": 2}]
    data = ("\n\n".join(json.dumps(row) for row in rows) + "\n").encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert texts(path) == ["öne", "two\nlines"]
    assert [item.origin for item in read_jsonl(path, "here", "text")] == ["here:1", "here:5"]


def test_json_lines_with_another_key_and_half_a_surrogate_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "a\\ud800b \\ud83d\\ude42"}')
    assert texts(path, key="body") == ["a\ufffdb 🙂"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"body": "x", "id": 1}', r"a.jsonl:2 has no key 'text' \(it has body, id\); name the text with --key"),
        ("{}", r"a.jsonl:2 has no key 'text' \(it has none\); name the text with --key"),
        ('{"text": 3}', "a.jsonl:2: 'text' is not text; name a key that holds text with --key"),
        ('{"text": "x"', "a.jsonl:2 is not JSON .*; each line must be one JSON object"),
        ('["x"]', "a.jsonl:2 holds no JSON object; each line must look like"),
    ],
)
def test_broken_json_lines_are_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(BadData, match=why) as caught:
        texts(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("broken", [b"not gzip", gzip.compress(b'{"text": "x"}\n' * 99)[:-12]], ids=["other", "cut"])
def test_broken_gzip(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(broken)
    with pytest.raises(BadData, match=r"a.jsonl.gz is a broken gzip file .*; fetch or pack it again"):
        texts(path)


def write_parquet(path: Path, **columns: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["one", None, "", "zwö"], n=[1, 2, 3, 4])
    assert [(item.text, item.origin) for item in read_parquet(path, "a", "text")] == [("one", "a:1"), ("zwö", "a:4")]


def test_parquet_with_a_dictionary_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", body=pyarrow.array(["one", "one"]).dictionary_encode())
    assert texts(path, key="body") == ["one", "one"]


def test_broken_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", body=["one"], n=[1])
    with pytest.raises(BadData, match=r"has no column 'text' \(it has body, n\); name the text with --key"):
        texts(path)
    with pytest.raises(BadData, match="column 'n' holds int64, not text; name the text with --key"):
        texts(path, key="n")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadData, match=r"a.parquet is not readable Parquet \(.*\); fetch it again") as caught:
        texts(path)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPart, match=r"Parquet data needs pyarrow: pip install 'armillary\[data\]'"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.png", "a", "a.gz", "a.parquet.gz", "a.json"])
def test_other_files_have_no_reader(name: str) -> None:
    assert reader_of(Path(name)) is None
