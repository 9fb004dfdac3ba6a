"""One reader per file format: a file is read as a stream of documents, never loaded in full.

Text and source code, JSON Lines (a text under one key), Parquet and Arrow (a text column), WebDataset tars and
TFRecord; `.gz` is unpacked.
"""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from armillary.errors import BadData, missing, one_line
from armillary.training.data.hub_datasets import opened_arrow
from armillary.training.data.tfrecord import example, records

PIECE = 256 * 1024
"""characters after which a text file is split, at a blank line, into several documents"""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text to learn from, or its token ids. `text` is never blank, unless there are `ids`; `origin` is the file,
    with a line or row where the file holds many."""

    text: str
    origin: str
    ids: tuple[int, ...] = ()

    @property
    def content(self) -> bytes:
        """What it says, as bytes: equal documents have equal ones."""
        return repr(self.ids).encode() if self.ids else self.text.encode()


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that was left out, and why, in a few words."""

    origin: str
    why: str


Reader = Callable[[Path, str, str], Iterator[Document | Skipped]]

_TEXT_SUFFIXES = (
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .css .scss .csv .tsv .toml .yaml .yml .ini .cfg "
    ".py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .java .kt .scala .go .rs .swift .js .jsx .mjs .ts .tsx .vue .rb .php "
    ".pl .lua .r .jl .hs .ml .ex .erl .clj .cs .fs .sh .bash .zsh .sql .proto .cmake .el .vim .tcl .f90 .asm .s"
)


def reader_of(path: Path) -> Reader | None:
    """The reader for a file's suffix, or None."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return None if suffix == ".parquet" and name.endswith(".gz") else READERS.get(suffix)


def read_text(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """The file as one document, or as pieces of at most PIECE characters split at blank lines."""
    try:
        with opened(path) as file:
            for number, text in enumerate(_pieces(file)):
                yield Document(text=text, origin=origin if number == 0 else f"{origin}#{number}")
    except UnicodeDecodeError:
        yield Skipped(origin=origin, why="not UTF-8 text")


def _pieces(file: Any) -> Iterator[str]:
    rest = ""
    with io.TextIOWrapper(file, encoding="utf-8-sig") as reader:
        while block := reader.read(PIECE):
            if "\0" in block:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a NUL byte is not text")
            rest += block
            while len(rest) > PIECE:
                cut = _cut(rest)
                yield from _unless_blank(rest[:cut])
                rest = rest[cut:]
    yield from _unless_blank(rest)


def _cut(text: str) -> int:
    """Where to split: after the last blank line, else after the last line, else right here."""
    for mark in ("\n\n", "\n"):
        position = text.rfind(mark, PIECE // 2, PIECE)
        if position >= 0:
            return position + len(mark)
    return PIECE


def _unless_blank(text: str | None) -> Iterator[str]:
    if text and not text.isspace():
        # JSON escapes can spell half a surrogate pair, which is no character; U+FFFD takes its place
        yield text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_jsonl(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """One document per line, its text under `key`."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                where = f"{path}:{number}"
                text = _under_key(json_row(line, where), key, where)
                yield from (Document(text=text, origin=f"{origin}:{number}") for text in _unless_blank(text))


def json_row(line: bytes, where: str, *, example: str = '{"text": "…"}') -> dict[str, Any]:
    """The JSON object of a line; an error shows the `example`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where} is not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise BadData(f"{where} holds no JSON object; each line must look like {example}")
    return row


def _under_key(row: dict[str, Any], key: str, where: str) -> str:
    text = row.get(key)
    if isinstance(text, str):
        return text
    if key in row:
        raise BadData(f"{where}: '{key}' is not text; name a key that holds text with --key")
    raise BadData(f"{where} has no key '{key}' (it has {', '.join(map(str, row)) or 'none'}); name the text with --key")


def read_parquet(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """One document per row, its text in column `key`; rows without one are left out."""
    with opened_parquet(path) as file:
        _check_column(file.schema_arrow, key, path)
        batches = file.iter_batches(columns=[key], batch_size=1024)
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for number, text in enumerate(texts, start=1):
            yield from (Document(text=item, origin=f"{origin}:{number}") for item in _unless_blank(text))


def read_arrow(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """One document per row, its text in column `key`, as the package `datasets` keeps them."""
    with opened_arrow(path) as (schema, batches):
        _check_column(schema, key, path)
        texts = (text for batch in batches for text in batch.column(key).to_pylist())
        for number, text in enumerate(texts, start=1):
            yield from (Document(text=item, origin=f"{origin}:{number}") for item in _unless_blank(text))


def _check_column(schema: Any, key: str, path: Path) -> None:
    from pyarrow import types

    if key not in schema.names:
        raise BadData(f"{path} has no column '{key}' (it has {', '.join(schema.names)}); name the text with --key")
    dtype = schema.field(key).type
    dtype = dtype.value_type if types.is_dictionary(dtype) else dtype
    if not (types.is_string(dtype) or types.is_large_string(dtype)):
        raise BadData(f"{path}: column '{key}' holds {dtype}, not text; name the text with --key")


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; a broken file is a one-line error."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing("pyarrow", "Parquet data", "data") from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} is not readable Parquet ({one_line(error)}); fetch it again") from None


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file's bytes, unpacked; a broken archive is a one-line error."""
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} is a broken gzip file ({one_line(error)}); fetch or pack it again") from None


# --- WebDataset: tar files in which adjacent files with the same name up to the first dot are one sample

_TAR_TEXT = ("txt", "text", "md", "json")
_LARGEST_MEMBER = 1 << 28
"""bytes of a file that is read at once at most"""


def read_tar(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """A document for each sample: what has the suffix `key`, or stands under `key` in its .json; for `text`, also .txt
    and .md. A list of integers is token ids. Samples without any of it (images) are counted as skipped."""
    without = 0
    for name, files in _samples(path):
        documents = list(_sample_documents(files, key, f"{origin}:{name}", path))
        without += not documents
        yield from documents
    if without:
        yield Skipped(origin=origin, why=f"{without} samples without .{' .'.join(_tar_suffixes(key))}")


def _samples(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Name and files of each sample; members of a sample are adjacent."""
    try:
        with tarfile.open(path, "r|*") as tar:
            members = (member for member in tar if member.isfile() and _sample_name(member.name)[1])
            for name, group in groupby(members, lambda member: _sample_name(member.name)[0]):
                yield name, {_sample_name(member.name)[1]: _content(tar, member, path) for member in group}
    except (FileNotFoundError, PermissionError):
        raise
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise BadData(f"{path} is a broken tar file ({one_line(error)}); fetch or pack it again") from None


def _sample_name(name: str) -> tuple[str, str]:
    """'a/b.c.txt' is sample 'a/b', suffix 'c.txt'; hidden files have none."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if stem else ""


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    if member.size > _LARGEST_MEMBER:
        raise BadData(f"{member.name} in {path} has {member.size} bytes, too many for one text; cut it into samples")
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def _tar_suffixes(key: str) -> tuple[str, ...]:
    return _TAR_TEXT if key == "text" else (key.lower(), "json")


def _sample_documents(files: dict[str, bytes], key: str, where: str, path: Path) -> Iterator[Document]:
    for suffix in filter(files.__contains__, _tar_suffixes(key)):
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


def read_tfrecord(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """One document per record, a tf.train.Example with text or token ids under `key`; checksums are verified."""
    with opened(path) as file:
        for number, data in enumerate(records(file, str(path)), start=1):
            where = f"record {number} of {path}"
            features = example(data, where)
            values = features.get(key, [])
            if not values:
                has = ", ".join(features) or "none"
                raise BadData(f"{where} has no text or integers under '{key}' (it has {has}); name them with --key")
            yield from _record_documents(values, f"{origin}:{number}", where)


def _record_documents(values: list[bytes] | list[int], origin: str, where: str) -> Iterator[Document]:
    texts = [value for value in values if isinstance(value, bytes)]
    if not texts:
        ids = [value for value in values if isinstance(value, int)]
        if min(ids) < 0:
            raise BadData(f"{where} has negative token ids; name another feature with --key")
        yield Document(text="", origin=origin, ids=tuple(ids))
        return
    try:
        joined = "\n".join(text.decode() for text in texts)
    except UnicodeDecodeError:
        raise BadData(f"{where} holds bytes that are not UTF-8 text; name another feature with --key") from None
    yield from (Document(text=text, origin=origin) for text in _unless_blank(joined))


READERS: dict[str, Reader] = dict.fromkeys(_TEXT_SUFFIXES.split(), read_text)
READERS |= {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".parquet": read_parquet, ".tar": read_tar, ".tgz": read_tar}
READERS |= {".arrow": read_arrow, ".tfrecord": read_tfrecord, ".tfrecords": read_tfrecord}
