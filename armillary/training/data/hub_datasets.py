"""Datasets of the Hugging Face Hub, through the package `datasets`: it fetches a split and keeps it as Arrow files on
this machine, which are read like any other file.

A source is hub:NAME, hub:OWNER/NAME or hub:OWNER/NAME/CONFIG, each with :SPLIT at its end (train where it is left out).
Slices of a split (train[:1%]) are refused: its files are whole.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armillary.errors import BadData, BadInput, NotFound, missing, one_line

HUB = "hub:"
INDEXED = b"ARROW1"
"""how an Arrow file with an index begins; `datasets` writes streams"""


def hub_name(source: str) -> tuple[str, str | None, str]:
    """(dataset, configuration, split) of a source."""
    name, _, split = source.removeprefix(HUB).partition(":")
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise BadInput(
            f"'{source}' names no dataset; write hub:OWNER/NAME, with /CONFIG and :SPLIT where it has several"
        )
    if split and not re.fullmatch(r"[\w.-]+", split):
        raise BadInput(f"'{split}' is no whole split; name one, as in hub:{name}:train")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train"


def hub_files(source: str) -> list[Path]:
    """The Arrow files of a split, fetched where they are not here yet."""
    name, config, split = hub_name(source)
    try:
        import datasets
    except ImportError:
        raise missing("datasets", f"{source}, a dataset of the Hub,", "hub") from None
    try:
        rows: Any = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # its own, the Hub's and the network's
        raise NotFound(f"{source} cannot be loaded ({one_line(error, 200)}); check its name and split") from None
    files = [Path(each["filename"]) for each in rows.cache_files]
    if not files:
        raise BadData(f"{source} is not kept in files; save it with save_to_disk and name that folder")
    return files


@contextmanager
def opened_arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """(schema, record batches) of an Arrow file, a stream or with an index; a broken one is a one-line error."""
    try:
        import pyarrow as arrow
    except ImportError:
        raise missing("pyarrow", "Arrow data", "data") from None
    try:
        with arrow.memory_map(str(path)) as file:
            has_index = file.read(len(INDEXED)) == INDEXED
            file.seek(0)
            if has_index:
                opened = arrow.ipc.open_file(file)
                yield opened.schema, (opened.get_batch(i) for i in range(opened.num_record_batches))
            else:
                stream = arrow.ipc.open_stream(file)
                yield stream.schema, iter(stream)
    except (FileNotFoundError, PermissionError):
        raise
    except (arrow.ArrowInvalid, OSError) as error:
        raise BadData(f"{path} is no Arrow file ({one_line(error)}); write it again") from None
