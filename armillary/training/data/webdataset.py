"""WebDataset: tar files in which files with the same name up to the first dot are one sample.

Read with the standard library: the grouping is all that is needed here, because samples become token shards before
training, and those are what gives random access, an order that is a pure function of the step, and packing.
"""

import json
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from armillary.errors import BadData
from armillary.training.data.document import Document, Skipped

_TEXT = ("txt", "text", "md", "json")
_LARGEST = 1 << 28
"""bytes of a file that is read at once at most"""


def read_tar(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """A document for each sample: what has the suffix `key`, or stands under `key` in its .json; for `text`, also .txt
    and .md. A list of integers is token ids. Samples without any of it (images) are counted as skipped."""
    without = 0
    for name, files in _samples(path):
        documents = list(_documents(files, key, f"{origin}:{name}", path))
        without += not documents
        yield from documents
    if without:
        yield Skipped(origin=origin, why=f"{without} samples without .{' .'.join(_wanted(key))}")


def _samples(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Name and files of each sample; members of a sample are adjacent."""
    name = ""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                key, suffix = _split(member.name)
                if not (member.isfile() and suffix):
                    continue
                if key != name and files:
                    yield name, files
                    files = {}
                name = key
                files[suffix] = _content(tar.extractfile(member), member, path)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise BadData(f"{path} is a broken tar file ({' '.join(str(error).split())}); fetch or pack it again") from None
    if files:
        yield name, files


def _split(name: str) -> tuple[str, str]:
    """'a/b.c.txt' is sample 'a/b', suffix 'c.txt'; hidden files have none."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if stem else ""


def _content(file: IO[bytes] | None, member: tarfile.TarInfo, path: Path) -> bytes:
    assert file is not None
    if member.size > _LARGEST:
        raise BadData(f"{member.name} in {path} has {member.size} bytes, too many for one text; cut it into samples")
    return file.read()


def _wanted(key: str) -> tuple[str, ...]:
    return _TEXT if key == "text" else (key.lower(), "json")


def _documents(files: dict[str, bytes], key: str, where: str, path: Path) -> Iterator[Document]:
    for suffix in _wanted(key):
        if suffix not in files:
            continue
        try:
            text = files[suffix].decode("utf-8-sig")
            content = json.loads(text) if suffix.endswith("json") else text
        except ValueError as error:
            raise BadData(f"{where}.{suffix} in {path} is not readable ({error}); pack it again") from None
        value: Any = content.get(key) if isinstance(content, dict) else content
        if isinstance(value, str) and value.strip():
            yield Document(text=value, origin=where)
            return
        if _is_ids(value):
            yield Document(text="", origin=where, ids=tuple(value))
            return


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)
