"""The commit of a checkpoint, without collectives: each rank reports its file through the rendezvous store, and the
main rank writes the rest, the manifest last, and gives the folder its name.
"""

import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.spec.toml.fields import to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import staged_folder
from armillary.store.manifest import NAME as MANIFEST
from armillary.store.manifest import FileEntry, block_sha256
from armillary.training.checkpoint.disk_errors import plain_errors

STATE, RANDOM, METADATA = "state.json", "rng.pt", ".metadata"
POLL_S = 0.02, 0.5


class Abandoned(Exception):
    """The run ended while a save waited for other ranks."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank has to say about its part of a save: its files, or why there are none."""

    files: Mapping[str, FileEntry]
    random: dict[str, torch.Tensor]
    places: tuple[tuple[int, int], ...] = ()  # offset and length of each chunk in a delta
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """What the main rank tells the others at the beginning of a save."""

    folder: Path  # to write into
    base: int | None = None  # step of the full checkpoint that this one is a delta of


class StoreChannel:
    """Values by key that ranks leave for each other in the rendezvous store. One rank alone keeps them itself."""

    def __init__(self, ranks: Consensus, token: str, abandoned: threading.Event) -> None:
        self._store = ranks.store if ranks.size > 1 else None
        self._own: dict[str, bytes] = {}
        self._token, self._abandoned = token, abandoned

    def put(self, key: str, value: Any) -> None:
        if self._store is None:
            self._own[key] = pickle.dumps(value)
        else:
            self._store.set(f"{self._token}/{key}", pickle.dumps(value))

    def take(self, key: str) -> Any:
        """Waits for the value, by polling: a blocking call would keep other threads from the store."""
        if self._store is None:
            return pickle.loads(self._own.pop(key))
        name, (pause, longest) = f"{self._token}/{key}", POLL_S
        while not self._store.check([name]):
            if self._abandoned.wait(pause):
                raise Abandoned
            pause = min(2 * pause, longest)
        return pickle.loads(self._store.get(name))

    def forget(self, key: str) -> None:
        if self._store is None:
            self._own.pop(key, None)
        else:
            self._store.delete_key(f"{self._token}/{key}")


@contextmanager
def new_folder(target: Path, allowed: Callable[[], None]) -> Iterator[tuple[Path, ExitStack]]:
    """A hidden folder, which gets its name when the stack is closed, and is removed after an error."""
    allowed()
    with ExitStack() as stack, plain_errors(target):
        yield stack.enter_context(staged_folder(target, overwrite=True)), stack


def refuse_failed(reports: Sequence[Report]) -> None:
    """Raise the first rank's error."""
    for report in reports:
        if report.error:
            raise ArmillaryError(report.error)


def commit(
    folder: Path,
    about: Mapping[str, Any],
    metadata: Metadata,
    reports: Sequence[Report],
    rename: Callable[[], None],
) -> int:
    """Write the main rank's files into the hidden folder, and rename it. Returns the size of all files."""
    files = {name: entry for report in reports for name, entry in report.files.items()}
    own = {
        METADATA: pickle.dumps(metadata),
        RANDOM: _torch_bytes([report.random for report in reports]),
        STATE: (nan_safe_json.dumps(about, indent=1) + "\n").encode(),
    }
    for name, content in own.items():
        (folder / name).write_bytes(content)
        files[name] = FileEntry(bytes=len(content), block_sha256=block_sha256(folder / name))
    table = {name: to_plain(files[name]) for name in sorted(files)}
    manifest = {"step": about["step"], "created": time.time(), "files": table}
    (folder / MANIFEST).write_text(nan_safe_json.dumps(manifest, indent=1) + "\n")
    rename()
    return sum(entry.bytes for entry in files.values())


def _torch_bytes(value: Any) -> bytes:
    """As torch writes it, in memory: into a file it would not say why that failed."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
