"""WebDataset tars as a source of text."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from armillary.errors import BadData, BadInput, NotFound
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.data.corpus import find_corpus, numbered
from armillary.training.data.readers import Document, Skipped
from armillary.training.data.shards import TokenShards
from armillary.training.prepare_data import prepare


def write_tar(path: Path, files: dict[str, bytes | str], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path


SAMPLES: dict[str, bytes | str] = {
    "a/001.txt": "first text",
    "a/001.cls": "3",
    "a/002.json": json.dumps({"text": "second text", "body": "another"}),
    "a/002.jpg": b"\xff\xd8",
    "a/003.jpg": b"\xff\xd8",
    "b.en.txt": "other language",
    "c.txt": "  ",
    ".hidden": "no",
    "d.json": json.dumps([5, 6, 7]),
}


def documents(source: str | Path, key: str = "text") -> list[Document | Skipped]:
    return list(find_corpus(source, key=key).documents())


def test_samples_become_documents(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", SAMPLES)
    assert documents(path) == [
        Document(text="first text", origin="x.tar:a/001"),
        Document(text="second text", origin="x.tar:a/002"),
        Document(text="", origin="x.tar:d", ids=(5, 6, 7)),
        Skipped(origin="x.tar", why="3 samples without .txt .text .md .json"),
    ]
    assert [item.text for item in documents(path, "cls") if isinstance(item, Document) and item.text] == ["3"]
    assert [item.text for item in documents(path, "body") if isinstance(item, Document) and item.text] == ["another"]
    assert [item.text for item in documents(path, "en.txt") if isinstance(item, Document)][:1] == ["other language"]


def test_a_numbered_set_and_packed_tars(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        write_tar(tmp_path / f"part-{number:03d}.tar.gz", {f"{number}.txt": f"text {number}"}, "w:gz")
    found = documents(f"{tmp_path}/part-{{008..010}}.tar.gz")
    assert [item.text for item in found if isinstance(item, Document)] == ["text 8", "text 9", "text 10"]
    assert numbered("a{1..2}-{08..09}") == ["a1-08", "a1-09", "a2-08", "a2-09"]
    with pytest.raises(NotFound, match="no file matches"):
        documents(f"{tmp_path}/other-{{1..3}}.tar")
    with pytest.raises(BadInput, match=r"\{3..1\} in .* counts down; write the smaller number first"):
        numbered("x{3..1}")


def test_broken_tars_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.txt": "text " * 1000})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(BadData, match=r"x.tar is a broken tar file \(.*\); fetch or pack it again"):
        documents(path)
    path.write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(BadData, match=r"x.tar is a broken tar file"):
        documents(path)
    with pytest.raises(BadData, match=r"a.json in .*x.tar is not readable \(.*\); pack it again"):
        documents(write_tar(path, {"a.json": "{"}))


def test_prepared_and_read_back(tmp_path: Path) -> None:
    """Token ids go in as they are, with the tokenizer they belong to; an end of text is added where there is none."""
    tokenizer = train_tokenizer(["first text second text"], 300)
    tokenizer.save(tmp_path / "tok")
    end = tokenizer.eos_id
    source = write_tar(tmp_path / "x.tar", {"1.txt": "first text", "2.json": "[5, 6, 7]", "3.json": f"[8, {end}]"})
    made = prepare(source, tmp_path / "out", tokenizer=tmp_path / "tok", held_out=0)
    shards = TokenShards.open(made.folder)
    assert [shards.document(number).tolist() for number in (1, 2)] == [[5, 6, 7, end], [8, end]]
    assert tokenizer.decode(shards.document(0)[:-1].tolist()) == "first text"
    with pytest.raises(BadInput, match=r"x.tar holds token ids already; say whose they are with --tokenizer"):
        prepare(source, tmp_path / "other", vocab=300)
    write_tar(source, {"2.json": "[5, 100000]"})
    with pytest.raises(BadInput, match=r"x.tar:2 holds id 100000, the tokenizer ends at \d+; give its own"):
        prepare(source, tmp_path / "other", tokenizer=tmp_path / "tok")


def test_shuffled_documents_are_the_same_ones_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    made = {
        on: prepare(tmp_path / "x.jsonl", tmp_path / f"out-{on}", vocab=300, shuffle=on, shard_tokens=100)
        for on in (False, True)
    }
    for split in ("train", "validation"):
        plain, mixed = (TokenShards.open(made[on].folder, split) for on in (False, True))
        mixed.verify()
        rows = [[tuple(shards.document(i).tolist()) for i in range(shards.num_documents)] for shards in (plain, mixed)]
        assert sorted(rows[0]) == sorted(rows[1])
        assert rows[0] != rows[1] or split == "validation"
    assert sorted(path.name for path in made[True].folder.iterdir()) == [
        "index.json",
        "tokenizer",
        "train",
        "validation",
    ]
    again = prepare(tmp_path / "x.jsonl", tmp_path / "again", vocab=300, shuffle=True, shard_tokens=100)
    np.testing.assert_array_equal(
        *(TokenShards.open(folder).read(0, 10**6) for folder in (again.folder, made[True].folder))
    )
    with pytest.raises(BadInput, match=r"was made with another shuffle \(True, now None\); add --overwrite"):
        prepare(tmp_path / "x.jsonl", made[True].folder, vocab=300, shard_tokens=100)
