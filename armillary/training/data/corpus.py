"""A corpus: the files a source stands for, in an order that does not change, read as a stream of documents.

A source is a file, a folder (everything readable below it), a glob, each also in a store (`s3://…`), a numbered set
(`part-{000..099}.tar`), a dataset of the Hub (`hub:OWNER/NAME:train`), or `stdlib`: the Python library on this machine.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import BadData, BadInput, NotFound, nearest
from armillary.store.remote import Remote, is_url
from armillary.training.data.hub_datasets import HUB, hub_files
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.readers import Document, Skipped, reader_of

STDLIB = "stdlib"
# tests of the library are as large as the library, repetitive, and in part deliberately badly encoded; encodings and
# pydoc_data are tables, not text
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that hold documents: `names` in reading order, relative to `root`; `source` is what the user called it.
    `key` is the JSONL key, Parquet column or suffix of WebDataset samples that holds the text; `skipped` files have a
    suffix that no reader takes. Files of a store are fetched into `cache`."""

    source: str
    root: Path | Remote
    names: tuple[str, ...]
    key: str = "text"
    skipped: tuple[Skipped, ...] = ()
    cache: Cache | None = None

    def documents(self) -> Iterator[Document | Skipped]:
        """Every document, and a note of every file that was left out; the same ones at each call."""
        yield from self.skipped
        for path, origin in self.local_files():
            reader = reader_of(path)
            assert reader is not None
            try:
                yield from reader(path, origin, self.key)
            except PermissionError:
                yield Skipped(origin=origin, why="not readable by this user")
            except FileNotFoundError:
                raise _went_away(str(path)) from None

    def local_files(self) -> Iterator[tuple[Path, str]]:
        """Each file on this machine, and what it is called; those of a store are fetched one by one."""
        for name in self.names:
            if isinstance(self.root, Path):
                yield self.root / name, name
            else:
                assert self.cache is not None
                yield self.cache.get(self.root, name), name

    @property
    def num_bytes(self) -> int:
        """Size of the files, as far as it is known."""
        return sum(self.sizes())

    def sizes(self) -> list[int]:
        """Bytes of each file, as far as they are known."""
        return [size for size, _ in self._facts()]

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or rewritten: names, sizes and times, not contents."""
        facts = [(name, *each) for name, each in zip(self.names, self._facts(), strict=True)]
        return hashlib.sha256(repr((self.key, facts)).encode()).hexdigest()

    def _facts(self) -> Sequence[tuple[int, int | str]]:
        """Size of each file, and what changes with its content."""
        if isinstance(self.root, Path):
            return [_about(self.root / name) for name in self.names]
        return self.root.facts(self.names)


def _about(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except FileNotFoundError:
        raise _went_away(str(path)) from None
    return about.st_size, about.st_mtime_ns


def _went_away(path: str) -> NotFound:
    return NotFound(f"{path} went away while it was being read; run it again")


def find_corpus(source: str | Path, *, key: str = "text", cache: Cache | None = None) -> Corpus:
    """The corpus that `source` names; an existing path wins over the reading as a glob. A URL needs a cache."""
    text, path = str(source), Path(source)
    if text == STDLIB:
        return _stdlib()
    if is_url(text):
        return _in_store(text, key, cache)
    if text.startswith(HUB):
        files = hub_files(text)
        return _of_files(text, Path(os.path.commonpath([file.parent for file in files])), files, key)
    if path.is_dir():
        return _of_files(text, path, _below(path), key)
    if path.is_file() and reader_of(path) is None:
        raise BadData(f"cannot read {path}: '{path.suffix}' is unknown; rename it to .txt, .jsonl, .parquet or .tar")
    if path.is_file():
        return Corpus(source=text, root=path.parent, names=(path.name,), key=key)
    names = numbered(text)
    if glob.has_magic(text) or len(names) > 1:
        matches = [Path(each) for name in names for each in sorted(glob.glob(name, recursive=True))]
        files = [file for file in matches if file.is_file()]
        if not files:
            raise NotFound(f"no file matches '{text}'; check the pattern")
        return _of_files(text, Path(os.path.commonpath([file.parent for file in files])), files, key)
    hint = f"did you mean {STDLIB}?" if nearest(text, [STDLIB]) else f"give a file, a folder, a glob or {STDLIB}"
    raise NotFound(f"no file or folder '{text}'; {hint}")


def numbered(text: str) -> list[str]:
    """`a-{08..11}.tar` as a-08.tar … a-11.tar, the notation of WebDataset; other texts as they are."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if not match:
        return [text]
    first, last = match.groups()
    if int(last) < int(first):
        raise BadInput(f"{match.group()} in '{text}' counts down; write the smaller number first")
    middle = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for each in middle for name in numbered(text[: match.start()] + each + text[match.end() :])]


def _in_store(source: str, key: str, cache: Cache | None) -> Corpus:
    """A file, a folder, a glob or a numbered set of a store."""
    if cache is None:
        raise BadInput(f"{source} is in a store, so it needs a cache folder; name one")
    root, names = _store_files(source)
    takes = [name for name in names if reader_of(Path(name))]
    if not takes:
        raise BadData(f"nothing to read in {source} ({_suffixes([Path(name) for name in names])}); it takes {_TAKES}")
    skipped = tuple(Skipped(origin=name, why="unknown suffix") for name in names if name not in set(takes))
    return Corpus(source=source, root=root, names=tuple(takes), key=key, skipped=skipped, cache=cache)


def _store_files(source: str) -> tuple[Remote, list[str]]:
    names = numbered(source)
    head = re.split(r"[*\[{]", source)[0].rpartition("/")[0]  # a question mark belongs to the URL
    if len(names) > 1:
        return Remote(url=head), [name.removeprefix(f"{head}/") for name in names]
    if re.search(r"[*\[]", source):
        return Remote(url=head), Remote(url=head).matching(source.removeprefix(f"{head}/"))
    parent, _, name = source.rstrip("/").rpartition("/")
    if reader_of(Path(name)):
        return Remote(url=parent), [name]
    folder = Remote(url=source.rstrip("/"))
    return folder, folder.matching("**")


_TAKES = ".txt, .md, .jsonl, .parquet, .tar, .tfrecord and source code"


def _of_files(source: str, root: Path, candidates: Iterable[Path], key: str) -> Corpus:
    paths = sorted(candidates, key=lambda path: path.as_posix())
    names = tuple(path.relative_to(root).as_posix() for path in paths if reader_of(path))
    unreadable = [path for path in paths if not reader_of(path)]
    if not names:
        raise BadData(f"nothing to read in {source} ({_suffixes(unreadable)}); it takes {_TAKES}")
    skipped = tuple(Skipped(origin=path.relative_to(root).as_posix(), why="unknown suffix") for path in unreadable)
    return Corpus(source=source, root=root, names=names, key=key, skipped=skipped)


def _suffixes(paths: list[Path]) -> str:
    common = Counter(path.suffix or path.name for path in paths).most_common(3)
    return ", ".join(f"{count} × {suffix}" for suffix, count in common) or "no files"


def _below(folder: os.PathLike[str], without: Set[str] = frozenset()) -> Iterator[Path]:
    """Regular files below `folder`, without hidden ones, caches and names of `without`; linked folders are not
    followed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__pycache__" or entry.name in without:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry, without)
            elif entry.is_file(follow_symlinks=False) or os.path.isfile(entry):  # a link may lead nowhere
                yield Path(entry)


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _below(root, _NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        raise NotFound(f"this Python has no library sources in {root}; give a file or folder of text instead")
    return _of_files(STDLIB, root, files, "text")
