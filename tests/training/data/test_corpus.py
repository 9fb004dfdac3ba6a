"""What a source stands for."""

from pathlib import Path

import pytest

from armillary.errors import BadData, NotFound
from armillary.training.data.corpus import Corpus, find_corpus
from armillary.training.data.readers import Document, Skipped


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.py", "a/k.md", ".git/hidden.txt", "a/__pycache__/c.py", "photo.png", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"in {name}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    return tmp_path


def origins(corpus: Corpus) -> list[str]:
    return [item.origin for item in corpus.documents() if isinstance(item, Document)]


def test_a_folder_is_read_in_order_and_says_what_it_skips(folder: Path) -> None:
    corpus = find_corpus(folder)
    assert origins(corpus) == ["a/k.md", "a/z.py", "b.txt"]
    assert [item for item in corpus.documents() if isinstance(item, Skipped)] == [
        Skipped(origin="LICENSE", why="unknown suffix"),
        Skipped(origin="photo.png", why="unknown suffix"),
        Skipped(origin="latin.txt", why="not UTF-8 text"),
    ]


def test_a_link_in_a_circle_hides_no_other_file(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}.txt").write_text("text")
    (folder / "circle.txt").symlink_to("circle.txt")
    (folder / "linked.txt").symlink_to("b.txt")
    names = find_corpus(folder).names
    assert {"b.txt", "linked.txt", *(f"{number}.txt" for number in range(20))} <= set(names)
    assert "circle.txt" not in names


def test_a_file_and_a_glob(folder: Path) -> None:
    assert origins(find_corpus(folder / "b.txt")) == ["b.txt"]
    assert origins(find_corpus(f"{folder}/a/*.[pm]*")) == ["k.md", "z.py"]
    assert origins(find_corpus(f"{folder}/**/[bz].*")) == ["a/z.py", "b.txt"]
    assert origins(find_corpus(f"{folder}/*.txt")) == ["b.txt"]


def test_an_existing_name_with_a_bracket_is_not_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("one")
    assert origins(find_corpus(tmp_path / "a[1].txt")) == ["a[1].txt"]


def test_the_fingerprint_follows_the_files(folder: Path) -> None:
    before = find_corpus(folder).fingerprint()
    assert find_corpus(folder).fingerprint() == before
    assert find_corpus(folder, key="body").fingerprint() != before
    (folder / "b.txt").write_text("something longer than before")
    changed = find_corpus(folder).fingerprint()
    assert changed != before
    (folder / "c.txt").write_text("new")
    assert find_corpus(folder).fingerprint() not in (before, changed)


def test_the_standard_library() -> None:
    corpus = find_corpus("stdlib")
    assert corpus.num_bytes > 5_000_000
    names = [name for _, name in corpus.local_files()]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        ("nowhere.txt", NotFound, "no file or folder '.*nowhere.txt'; give a file, a folder, a glob or stdlib"),
        ("*.rtf", NotFound, "no file matches '.*rtf'; check the pattern"),
        ("photo.png", BadData, "cannot read .*: '.png' is unknown; rename it to .txt, .jsonl, .parquet or .tar"),
        ("*.png", BadData, r"nothing to read in .* \(1 × .png\); it takes .txt, .md, .jsonl"),
        ("empty", BadData, r"nothing to read in .* \(no files\); it takes"),
    ],
)
def test_sources_that_cannot_be_used(folder: Path, source: str, error: type[Exception], why: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(error, match=why):
        find_corpus(f"{folder}/{source}")


def test_a_misspelt_stdlib() -> None:
    with pytest.raises(NotFound, match="no file or folder 'stdlb'; did you mean stdlib"):
        find_corpus("stdlb")


def test_a_file_that_goes_away(folder: Path) -> None:
    corpus = find_corpus(folder)
    (folder / "b.txt").unlink()
    with pytest.raises(NotFound, match=r"b.txt went away while it was being read; run it again"):
        origins(corpus)
    with pytest.raises(NotFound, match=r"b.txt went away"):
        corpus.fingerprint()
