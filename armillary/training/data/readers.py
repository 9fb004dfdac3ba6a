"""One reader per file format: a file is read as a stream of documents, never loaded in full.

Text and source code, JSON Lines (a text under one key), Parquet (a text column) and WebDataset tars; `.gz` is unpacked.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armillary.errors import BadData, missing
from armillary.training.data.document import Document, Skipped
from armillary.training.data.webdataset import read_tar

PIECE = 256 * 1024
"""characters after which a text file is split, at a blank line, into several documents"""


Reader = Callable[[Path, str, str], Iterator[Document | Skipped]]

_TEXT = (
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


def _unless_blank(text: str) -> Iterator[str]:
    if text and not text.isspace():
        yield text if text.isascii() else _valid(text)


def _valid(text: str) -> str:
    """JSON escapes can spell half a surrogate pair, which is no character; U+FFFD takes its place."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_jsonl(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """One document a line, its text under `key`."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                where = f"{path}:{number}"
                text = _under_key(json_row(line, where), key, where)
                yield from (Document(text=text, origin=f"{origin}:{number}") for text in _unless_blank(text))


def json_row(line: bytes, where: str, *, like: str = '{"text": "…"}') -> dict[str, Any]:
    """The JSON object of a line; `like` is what an error shows."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where} is not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise BadData(f"{where} holds no JSON object; each line must look like {like}")
    return row


def _under_key(row: dict[str, Any], key: str, where: str) -> str:
    text = row.get(key)
    if isinstance(text, str):
        return text
    if key in row:
        raise BadData(f"{where}: '{key}' is not text; name a key that holds text with --key")
    raise BadData(f"{where} has no key '{key}' (it has {', '.join(map(str, row)) or 'none'}); name the text with --key")


def read_parquet(path: Path, origin: str, key: str) -> Iterator[Document | Skipped]:
    """One document a row, its text in column `key`; rows without one are left out."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing("pyarrow", "Parquet data", "data") from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow, key, path, arrow)
            yield from _rows(file, key, origin)
    except (FileNotFoundError, PermissionError):
        raise
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} is not readable Parquet ({_one_line(error)}); fetch it again") from None


def _check_column(schema: Any, key: str, path: Path, arrow: Any) -> None:
    if key not in schema.names:
        raise BadData(f"{path} has no column '{key}' (it has {', '.join(schema.names)}); name the text with --key")
    kind = schema.field(key).type
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise BadData(f"{path}: column '{key}' holds {kind}, not text; name the text with --key")


def _rows(file: Any, key: str, origin: str) -> Iterator[Document]:
    number = 0
    for batch in file.iter_batches(columns=[key], batch_size=1024):
        for text in batch.column(0).to_pylist():
            number += 1
            if text is not None:
                yield from (Document(text=item, origin=f"{origin}:{number}") for item in _unless_blank(text))


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file's bytes, unpacked; a broken archive is a one-line error."""
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} is a broken gzip file ({_one_line(error)}); fetch or pack it again") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


READERS: dict[str, Reader] = dict.fromkeys(_TEXT.split(), read_text)
READERS |= {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".parquet": read_parquet, ".tar": read_tar, ".tgz": read_tar}
