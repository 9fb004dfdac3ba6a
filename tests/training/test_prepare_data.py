"""From a source to token shards, whole or not at all."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import armillary
from armillary.errors import BadData, BadInput, BadModel, NotFound
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.data.shards import TokenShards
from armillary.training.prepare_data import prepare

TEXTS = [f"def number_{i}():\n    return {i}  # {'ab ' * (i % 7)}<|endoftext|>\n" for i in range(120)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def decoded(folder: Path, split: str) -> list[str]:
    shards, tokenizer = TokenShards.open(folder, split), Tokenizer.load(folder / "tokenizer")
    return [tokenizer.decode(shards.document(number)) for number in range(shards.num_documents)]


def test_the_text_comes_back(source: Path, tmp_path: Path) -> None:
    done = prepare(source, tmp_path / "out", vocab=400, held_out=0.1, shard_tokens=1000)
    train, validation = decoded(done.folder, "train"), decoded(done.folder, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in train]
    assert 3 <= len(validation) <= 30
    assert not done.reused and done.num_documents == 120
    assert len(done.index.splits["train"]) > 1
    assert done.bytes_per_token == pytest.approx(sum(map(len, TEXTS)) / done.num_tokens)
    for split in ("train", "validation"):
        TokenShards.open(done.folder, split).verify()


def test_a_document_starts_and_ends_with_the_end_of_text_and_holds_no_other(source: Path, tmp_path: Path) -> None:
    shards = TokenShards.open(prepare(source, tmp_path / "out", vocab=400).folder)
    ends = [np.flatnonzero(shards.document(n) == 0).tolist() for n in range(shards.num_documents)]
    assert ends == [[0, len(shards.document(n)) - 1] for n in range(shards.num_documents)]


def test_it_is_deterministic_and_the_split_ignores_files_and_order(source: Path, tmp_path: Path) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        names = [name for name in folder.rglob("*") if name.is_file() and name.name != "index.json"]
        return {name.relative_to(folder).as_posix(): name.read_bytes() for name in names}

    one, two = (prepare(source, tmp_path / name, vocab=400) for name in ("one", "two"))
    assert content(one.folder) == content(two.folder)
    (tmp_path / "files").mkdir()
    for number, text in enumerate(reversed(TEXTS)):
        (tmp_path / "files" / f"{number:03d}.txt").write_text(text)
    other = prepare(tmp_path / "files", tmp_path / "three", vocab=400)
    assert sorted(decoded(other.folder, "validation")) == sorted(decoded(one.folder, "validation"))
    assert other.index.tokenizer_sha256 == one.index.tokenizer_sha256


def test_a_given_tokenizer_is_kept(source: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["something else"], 300)
    tokenizer.save(tmp_path / "given")
    done = prepare(source, tmp_path / "out", tokenizer=tmp_path / "given")
    assert done.index.tokenizer_sha256 == tokenizer.fingerprint
    assert done.index.vocab == tokenizer.vocab_size
    assert sorted(decoded(done.folder, "train") + decoded(done.folder, "validation")) == sorted(TEXTS)


def test_ids_are_as_small_as_the_vocabulary_allows(source: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], 300)
    tokenizer.backend.add_tokens([f"<{number}>" for number in range(2**16)])
    tokenizer.save(tmp_path / "large")
    assert prepare(source, tmp_path / "out", tokenizer=tmp_path / "large").index.dtype == "uint32"
    assert prepare(source, tmp_path / "small", vocab=300).index.dtype == "uint16"


def test_skipped_files_are_counted_and_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in {"a.txt": b"one", "b.txt": b"two", "c.txt": b"\xff", "d.png": b"x"}.items():
        (tmp_path / "in" / name).write_bytes(content)
    index = prepare(tmp_path / "in", tmp_path / "out", vocab=300).index
    assert (index.num_skipped, index.num_documents("train"), index.num_documents("validation")) == (2, 1, 1)
    assert index.skipped == ("d.png: unknown suffix", "c.txt: not UTF-8 text")


def test_progress_is_told(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    prepare(source, tmp_path / "out", vocab=300, progress=lambda *what: told.append(what))
    stages = list(dict.fromkeys(what for _, _, what in told))
    assert stages == ["reading", "training the tokenizer", "encoding"]
    assert all(0 <= done <= total for done, total, _ in told)
    assert told[-1][0] == told[-1][1]


# --- a folder that is there already


def test_the_same_request_is_reused(source: Path, tmp_path: Path) -> None:
    first = prepare(source, tmp_path / "out", vocab=300)
    before = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    again = prepare(source, tmp_path / "out", vocab=300, overwrite=True)
    assert again.reused and again.index == first.index
    assert (tmp_path / "out" / "index.json").stat().st_mtime_ns == before


def test_another_request_needs_overwrite(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out", vocab=300)
    with pytest.raises(BadInput, match=r"was made with another tokenizer \(300, now 301\); add --overwrite"):
        prepare(source, tmp_path / "out", vocab=301)
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    with pytest.raises(BadInput, match=r"was made with an earlier state of .*corpus.jsonl; add --overwrite to replace"):
        prepare(source, tmp_path / "out", vocab=300)
    assert prepare(source, tmp_path / "out", vocab=300, overwrite=True).num_documents == 121
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_a_damaged_folder_is_not_reused(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out", vocab=300)
    (tmp_path / "out" / "train" / "00000.bin").unlink()
    with pytest.raises(BadData, match=r"00000.bin is missing"):
        prepare(source, tmp_path / "out", vocab=300)
    again = prepare(source, tmp_path / "out", vocab=300, overwrite=True)
    assert not again.reused and again.remade.endswith("00000.bin is missing")
    assert not prepare(source, tmp_path / "out", vocab=300, overwrite=True).remade


def test_other_peoples_folders_are_never_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BadInput, match="holds no token data, so it is never overwritten; choose another name"):
        prepare(source, tmp_path / "thesis", vocab=300, overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


# --- what goes wrong


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"vocab": 100}, "a vocabulary of 100 is below the 260 of byte-level BPE; try --tokenizer 8192"),
        ({"held_out": 1.0}, "held_out=1.0 is not a fraction between 0 and 0.5"),
        ({"seed": -1}, "seed=-1 is not between 0 and"),
    ],
)
def test_settings_that_cannot_be_used(source: Path, tmp_path: Path, options: dict[str, float], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        prepare(source, tmp_path / "out", **options)


def test_tokenizers_that_cannot_be_used(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no tokenizer.json in"):
        prepare(source, tmp_path / "out", tokenizer=tmp_path)
    train_tokenizer([], 300).backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadModel, match="has no eos_token; name one in its tokenizer_config"):
        prepare(source, tmp_path / "out", tokenizer=tmp_path)


def test_an_error_half_way_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with source.open("a") as file:
        file.write('{"body": "x"}\n')
    with pytest.raises(BadData, match=r"corpus.jsonl:121 has no key 'text'"):
        prepare(source, tmp_path / "out", vocab=300)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_killed_half_way_it_leaves_nothing_that_looks_finished(source: Path, tmp_path: Path) -> None:
    program = """
        import sys, time
        from armillary.training.prepare_data import prepare

        def progress(done, total, what):
            if what == "encoding":
                print("encoding", flush=True)
                time.sleep(60)

        prepare(sys.argv[1], sys.argv[2], vocab=300, shard_tokens=100, progress=progress)
    """
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(program), str(source), str(out)]
    paths = {"PYTHONPATH": str(Path(armillary.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | paths) as process:
        assert process.stdout is not None and process.stdout.readline() == "encoding\n"
        process.send_signal(signal.SIGKILL)
    left = [path for path in tmp_path.iterdir() if path != source]
    assert [path.name.startswith(".out.partial-") for path in left] == [True]
    assert list(left[0].glob("train/*.bin")) and not (left[0] / "index.json").exists()
    with pytest.raises(NotFound, match="no token data"):
        TokenShards.open(out)
    assert prepare(source, out, vocab=300).num_documents == 120


@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_that_are_encoded_elsewhere_make_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    """With a sample smaller than the text, files of several sizes, and one that is not text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(23):
        text = "".join(f"{line * number} is line {line} of {number % 5}\n" for line in range(3 + number % 7))
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "07.txt").write_bytes(b"\xff\xfe\x00broken")
    (folder / "picture.xyz").write_bytes(b"0")
    monkeypatch.setattr("armillary.training.data.tokenize_corpus.SAMPLE_BYTES", 900)
    monkeypatch.setattr("armillary.training.data.encode_parts.parts_of.__defaults__", (200,))
    lengths: list[int] = []

    def mapped(function: Any, parts: Iterable[Any]) -> Iterator[Any]:
        parts = list(parts)
        lengths.append(len(parts))
        assert all(part.root.is_absolute() for part in parts), "a worker has another working folder"
        return (pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(function))(part))) for part in parts)

    settings: dict[str, Any] = {"vocab": 300, "held_out": 0.2, "shard_tokens": 300, "shuffle": shuffle}
    monkeypatch.chdir(tmp_path)
    prepare("text", tmp_path / "here", **settings)
    prepare("text", tmp_path / "parts", **settings, mapped=mapped)
    assert min(lengths) > 3
    assert files_of(tmp_path / "here") == files_of(tmp_path / "parts")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
