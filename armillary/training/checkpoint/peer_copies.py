"""Checkpoints in memory: written more often than those on disk, and read after a crash without a disk or a store.

Each machine keeps the files of its ranks in shared memory, which outlives their processes, and a copy of the files of
another machine's ranks, so that losing one machine loses nothing.

    /dev/shm/armillary-UID/RUN/checkpoints/STEP/    a checkpoint as on disk, with the files that this machine has
    /dev/shm/armillary-UID/RUN/run                  the path of the run's folder
"""

import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.parallel.world import new_group
from armillary.store import nan_safe_json
from armillary.store.manifest import NAME as MANIFEST
from armillary.store.manifest import size_faults
from armillary.store.runs import Run
from armillary.store.writer_process import machine
from armillary.training.checkpoint.save_plan import file_name

ROOT = Path("/dev/shm")
_PIECE = 64 << 20
_PATH = "run"


def memory_run(run: Run, root: Path | None = None) -> Run:
    """The run's folder in memory."""
    place = blake2b(str(run.folder.resolve()).encode(), digest_size=4).hexdigest()
    return Run(folder=(root or ROOT) / f"armillary-{os.getuid()}" / f"{run.id}-{place}")


class PeerCopies:
    """The machines of the ranks, and which rank's file each rank keeps a copy of; every rank makes one."""

    def __init__(self, run: Run, ranks: Consensus, *, node: str | None = None, root: Path | None = None) -> None:
        self.run, self._on_disk, self._ranks = memory_run(run, root), run, ranks
        nodes = ranks.gather(node or machine())
        self._shift = peer_shift(nodes)
        self.leads = nodes.index(nodes[ranks.rank]) == ranks.rank
        self.main_node = nodes[ranks.rank] == nodes[0]
        self._group = new_group(backend="gloo") if self._shift else None
        ranks.run_on_all(self._clean)

    def _clean(self) -> None:
        """Leftovers of processes that are gone: a run has one owner."""
        if not self.leads:
            return
        try:
            folder = self.run.checkpoint(0).parent
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.run.folder / _PATH).write_text(str(self._on_disk.folder.resolve()))
            for path in folder.glob(".*"):
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise ArmillaryError(
                f"no copies can be kept in {self.run.folder} ({error.strerror}); try --set train.peer_copy_every=0"
            ) from error

    @property
    def copies(self) -> int:
        """How many times a rank's file may be in memory: the last copy and the next one, here and at the peer."""
        return 4 if self._shift else 2

    def place(self, folder: Path) -> Path:
        """This machine's folder of the same name."""
        return self.run.folder / "checkpoints" / folder.name

    def swap_files(self, folder: Path) -> None:
        """Send this rank's file to the next machine, and keep that of the machine before."""
        if not self._shift:
            return
        size, rank = self._ranks.size, self._ranks.rank
        to, source = (rank + self._shift) % size, (rank - self._shift) % size
        own = _map_file(folder / file_name(rank))
        length = int(_swap(torch.tensor([len(own)]), torch.tensor([0]), to, source, self._group))
        try:
            received, full = _map_file(folder / file_name(source), length), None
        except OSError as error:  # the transfer takes place all the same: the other rank waits for it
            received, full = torch.empty(length, dtype=torch.uint8), error
        _swap(own, received, to, source, self._group)
        if full is not None:
            raise full

    def commit(self, folder: Path, step: int, small: Mapping[str, bytes] | None) -> None:
        """Complete the checkpoint on a machine that is not the main rank's, and forget older ones; None: it failed."""
        if small is None:
            if self.leads and not self.main_node:
                shutil.rmtree(folder, ignore_errors=True)
            return
        if self.leads and not self.main_node:
            for name, content in small.items():
                (folder / name).write_bytes(content)
            target = self.run.checkpoint(step)
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
        self.forget_before(step)

    def forget_before(self, step: int) -> None:
        if self.leads:
            for number in self.run.checkpoint_steps():
                if number < step:
                    shutil.rmtree(self.run.checkpoint(number), ignore_errors=True)

    def clear(self) -> None:
        """The run has ended in order: its memory is free again."""
        if self.leads:
            shutil.rmtree(self.run.folder, ignore_errors=True)


def peer_shift(nodes: Sequence[str]) -> int:
    """How many ranks further a rank's copy is kept: on another machine for every rank, or as many as possible. 0: there
    is one machine."""
    size = len(nodes)
    if len(set(nodes)) == 1:
        return 0

    def apart(shift: int) -> int:
        return sum(node != nodes[(rank + shift) % size] for rank, node in enumerate(nodes))

    return max(range(1, size), key=lambda shift: (apart(shift), -shift))


def small_files(folder: Path) -> dict[str, bytes]:
    """Everything but the ranks' files."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".distcp"}


# --- what runs leave behind


def sweep_memory(root: Path | None = None) -> int:
    """Free the memory of runs that failed and will not need it: they were finished or deleted since, or have a
    checkpoint on disk that is as new. Returns the bytes."""
    freed = 0
    for path in (root or ROOT).glob(f"armillary-{os.getuid()}/*/{_PATH}"):
        with suppress(OSError):
            if _is_left_over(Run(folder=path.parent), Run(folder=Path(path.read_text()))):
                freed += sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
                shutil.rmtree(path.parent, ignore_errors=True)
    return freed


def _is_left_over(copy: Run, on_disk: Run) -> bool:
    if not on_disk.folder.exists():
        return on_disk.folder.parent.is_dir()  # else its file system may be away
    state, copies = on_disk.state.state, copy.checkpoint_steps()
    if state == "running":
        return False
    newer = [step for step in on_disk.checkpoint_steps() if not copies or step >= copies[-1]]
    return state == "finished" or not copies or any(not size_faults(on_disk.checkpoint(step)) for step in newer)


# --- after a crash


def gather_newest(run: Run, ranks: Consensus, *, root: Path | None = None, newer_than: int = 0) -> int:
    """The newest checkpoint that the machines have in memory together, or 0; files that a machine lacks are sent to it.
    Every rank calls this."""
    here = memory_run(run, root)
    have = ranks.gather({step: _files(here.checkpoint(step)) for step in here.checkpoint_steps()})
    for step in sorted({step for steps in have for step in steps}, reverse=True):
        if step <= newer_than:
            return 0
        names = _complete([files.get(step, {}) for files in have])
        for name in names:
            _spread(here.checkpoint(step) / name, [files.get(step, {}) for files in have], ranks)
        if not names:
            continue
        complete = ranks.gather(not size_faults(here.checkpoint(step)))
        return step if all(complete) else 0
    return 0


def _files(folder: Path) -> dict[str, Any]:
    """Name -> size of the files there; of the manifest its content."""
    files: dict[str, Any] = {path.name: path.stat().st_size for path in folder.iterdir()}
    if MANIFEST in files:
        with suppress(ArmillaryError):
            files[MANIFEST] = nan_safe_json.read_table(folder / MANIFEST)
    return files


def _complete(have: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of all files of a checkpoint, where the ranks' machines have each of them in full length; else none."""
    manifest = next((files[MANIFEST] for files in have if isinstance(files.get(MANIFEST), Mapping)), None)
    if manifest is None:
        return []
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    complete = all(any(files.get(name) == size for files in have) for name, size in sizes.items())
    return [*sizes, MANIFEST] if complete else []


def _spread(path: Path, have: Sequence[Mapping[str, Any]], ranks: Consensus) -> None:
    """Send a file from the first rank that has it to the machines that do not."""
    present = [path.name in files for files in have]
    if all(present):
        return
    source = present.index(True)
    content = [path.read_bytes() if ranks.rank == source else None]
    dist.broadcast_object_list(content, src=source, group=ranks.group)
    if not present[ranks.rank] and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{ranks.rank}")
        partial.write_bytes(content[0] or b"")
        partial.replace(path)


# --- files as tensors


def _map_file(path: Path, size: int | None = None) -> Tensor:
    """A file as a tensor of bytes: one that is there, or a new one of this size."""
    length = size if size is not None else path.stat().st_size if path.exists() else 0
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if size is not None:
            os.posix_fallocate(descriptor, 0, length)  # memory that is full is an error now, not a signal later
        return torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _swap(sent: Tensor, received: Tensor, to: int, source: int, group: Any) -> Tensor:
    """Send one tensor and receive another, a piece at a time."""
    for at in range(0, max(len(sent), len(received)), _PIECE):
        works = []
        if at < len(sent):
            works.append(dist.isend(sent[at : at + _PIECE], to, group=group))
        if at < len(received):
            works.append(dist.irecv(received[at : at + _PIECE], source, group=group))
        for work in works:
            work.wait()
    return received
