"""A corpus: the files a source stands for, in an order that does not change, read as a stream of documents.

A source is a file, a folder (everything readable below it), a glob, or `stdlib`: the Python library on this machine.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import BadData, NotFound, nearest
from armillary.training.data.readers import Document, Skipped, reader_of

STDLIB = "stdlib"
# tests of the library are as large as the library, repetitive, and in part deliberately badly encoded; encodings and
# pydoc_data are tables, not text
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that hold documents."""

    source: str
    """what the user called it"""
    root: Path
    """origins are named relative to this folder"""
    files: tuple[Path, ...]
    """in reading order"""
    key: str = "text"
    """JSONL key or Parquet column that holds the text"""
    skipped: tuple[Skipped, ...] = ()
    """files left out because no reader takes their suffix"""

    def documents(self) -> Iterator[Document | Skipped]:
        """Every document, and a note of every file that was left out; the same ones at each call."""
        yield from self.skipped
        for path in self.files:
            reader = reader_of(path)
            assert reader is not None
            try:
                yield from reader(path, self._origin(path), self.key)
            except PermissionError:
                yield Skipped(origin=self._origin(path), why="not readable by this user")
            except FileNotFoundError:
                raise NotFound(f"{path} went away while it was being read; run it again") from None

    @property
    def num_bytes(self) -> int:
        """Size of the files on disk."""
        return sum(_stat(path).st_size for path in self.files)

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or rewritten: names, sizes and times, not contents."""
        facts = [(self._origin(path), _stat(path).st_size, _stat(path).st_mtime_ns) for path in self.files]
        return hashlib.sha256(repr((self.key, facts)).encode()).hexdigest()

    def _origin(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def find_corpus(source: str | Path, *, key: str = "text") -> Corpus:
    """The corpus that `source` names; an existing path wins over the reading as a glob."""
    text, path = str(source), Path(source)
    if text == STDLIB:
        return _stdlib()
    if path.is_dir():
        return _of_files(text, path, _below(path), key)
    if path.is_file():
        return _of_file(text, path, key)
    if glob.has_magic(text):
        found = [Path(name) for name in glob.glob(text, recursive=True)]
        files = [file for file in found if file.is_file()]
        if not files:
            raise NotFound(f"no file matches '{text}'; check the pattern")
        return _of_files(text, Path(os.path.commonpath([file.parent for file in files])), files, key)
    hint = f"did you mean {STDLIB}?" if nearest(text, [STDLIB]) else f"give a file, a folder, a glob or {STDLIB}"
    raise NotFound(f"no file or folder '{text}'; {hint}")


def _of_file(source: str, path: Path, key: str) -> Corpus:
    if reader_of(path) is None:
        raise BadData(f"cannot read {path}: '{path.suffix}' is unknown; rename it to .txt, .jsonl or .parquet")
    return Corpus(source=source, root=path.parent, files=(path,), key=key)


def _of_files(source: str, root: Path, found: Iterable[Path], key: str) -> Corpus:
    paths = sorted(found, key=lambda path: path.as_posix())
    files = tuple(path for path in paths if reader_of(path))
    others = [path for path in paths if not reader_of(path)]
    if not files:
        takes = ".txt, .md, .jsonl, .parquet and source code"
        raise BadData(f"nothing to read in {source} ({_suffixes(others)}); it takes {takes}")
    skipped = tuple(Skipped(origin=path.relative_to(root).as_posix(), why="unknown suffix") for path in others)
    return Corpus(source=source, root=root, files=files, key=key, skipped=skipped)


def _suffixes(paths: list[Path]) -> str:
    common = Counter(path.suffix or path.name for path in paths).most_common(3)
    return ", ".join(f"{count} × {suffix}" for suffix, count in common) or "no files"


def _below(folder: Path) -> Iterator[Path]:
    """Regular files below `folder`, without hidden ones and caches; linked folders are not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _below(root) if path.suffix == ".py" and _NOT_LIBRARY.isdisjoint(_parts(path, root))]
    if not files:
        raise NotFound(f"this Python has no library sources in {root}; give a file or folder of text instead")
    return _of_files(STDLIB, root, files, "text")


def _parts(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root).parts


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise NotFound(f"{path} went away while it was being read; run it again") from None
