"""Checkpoints: everything a run needs to resume as if it had never stopped, on any layout and number of ranks.

    checkpoints/STEP/
      __RANK_0.distcp  .metadata   tensors by our names, through torch.distributed.checkpoint
      state.json                   step, loss scale, kernel choices, layout: everything but tensors
      rng.pt                       random state of every rank
      manifest.json                every file with its size and checksum; written last

A folder is written under a hidden name and renamed when it is complete, so a folder with a number is complete. Old
ones are deleted (`prune`) once a newer one is complete and on disk.
"""

import errno
import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from armillary.errors import ArmillaryError, BadData, one_line
from armillary.parallel.consensus import Consensus
from armillary.spec.toml.fields import to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import remove_folder, staged_folder
from armillary.store.manifest import NAME as MANIFEST
from armillary.store.manifest import block_sha256, checkpoint_files, content_faults, size_faults
from armillary.store.runs import Run
from armillary.training.step.numerics import random_state, set_random_state

STATE, RANDOM = "state.json", "rng.pt"
VERSION = 1
"""raised when an older armillary could misread what is written"""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was committed, and the size of all its files."""

    step: int
    folder: Path
    bytes: int


def save(
    run: Run,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    ranks: Consensus,
    allowed: Callable[[], None] = lambda: None,
) -> Saved:
    """Write checkpoint `step`: each rank its part of the tensors, the main rank the rest. All ranks call this, and all
    raise the same error when one of them cannot write; older checkpoints are then untouched. `allowed()` may raise,
    too: it is called before anything is written and before the folder is renamed."""
    target = run.checkpoint(step)
    ranks.run_on_all(allowed)
    with ExitStack() as stack:
        folder = ranks.broadcast(ranks.run_on_all(lambda: _staged(stack, target) if ranks.is_main else None))
        assert folder is not None
        about = {"version": VERSION, "step": step, "ranks": ranks.size, **facts}
        states = ranks.gather(random_state())
        parts = ranks.gather(ranks.run_on_all(lambda: _write_tensors(folder, tensors, ranks)))
        hashes = {name: digest for part in parts for name, digest in part.items()}
        size = ranks.run_on_all(lambda: _commit(stack, folder, about, states, hashes, allowed) if ranks.is_main else 0)
        return Saved(step=step, folder=target, bytes=ranks.broadcast(size))


def _staged(stack: ExitStack, target: Path) -> Path:
    with _plain(target):
        return stack.enter_context(staged_folder(target, overwrite=True))


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus) -> dict[str, str]:
    """This rank's files and their checksums."""
    with _plain(folder):
        with _quiet():
            dcp.save(dict(tensors), storage_writer=_Writer(folder), process_group=ranks.group, no_dist=ranks.size == 1)
        return {path.name: block_sha256(path) for path in folder.glob(f"__{ranks.rank}_*.distcp")}


def _commit(
    stack: ExitStack,
    folder: Path,
    about: Mapping[str, Any],
    states: list[dict[str, Tensor]],
    hashes: Mapping[str, str],
    allowed: Callable[[], None],
) -> int:
    """The main rank's files, the manifest last; then the folder gets its name. Gives the size of all."""
    with _plain(folder):
        (folder / RANDOM).write_bytes(_bytes(states))
        (folder / STATE).write_text(nan_safe_json.dumps(about, indent=1) + "\n")
        files = checkpoint_files(folder, hashes)
        manifest = {"step": about["step"], "files": {name: to_plain(entry) for name, entry in files.items()}}
        (folder / MANIFEST).write_text(nan_safe_json.dumps(manifest, indent=1) + "\n")
        allowed()
        stack.close()
        return sum(entry.bytes for entry in files.values())


def _bytes(value: Any) -> bytes:
    """As torch writes it, in memory: into a file it would not say why that failed."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint of any layout, put the random state back where the number of ranks is
    the same, and give the facts. All ranks call this, and all raise the same line when one of them cannot read."""
    about = ranks.run_on_all(lambda: read_facts(folder))
    ranks.run_on_all(lambda: _read_tensors(folder, tensors, ranks))
    if about["ranks"] == ranks.size:
        set_random_state(torch.load(folder / RANDOM, weights_only=True)[ranks.rank])
    return about


def _read_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus) -> None:
    try:
        with _quiet():
            dcp.load(
                dict(tensors),
                storage_reader=dcp.FileSystemReader(folder),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise BadData(f"{folder} is no checkpoint of this model ({one_line(first, 200)}); name another run") from error


def read_facts(folder: Path) -> dict[str, Any]:
    about = nan_safe_json.read_table(folder / STATE)
    if about.get("version", 0) > VERSION:
        raise BadData(f"{folder} was written by a newer armillary; upgrade armillary to resume it")
    return about


def kernels_of(run: Run, step: int) -> dict[str, str]:
    """The kernels of a checkpoint, which a resumed run uses too."""
    return dict(read_facts(run.checkpoint(step)).get("kernels", {})) if step else {}


def saved_steps(run: Run) -> list[int]:
    """Steps with a complete checkpoint, in order; one with a missing or truncated file does not count. Contents are not
    read: `newest` reads them."""
    return [step for step in run.checkpoint_steps() if not size_faults(run.checkpoint(step))]


def prune(run: Run, step: int, retain: int) -> list[int]:
    """Delete checkpoints before the one of `step`, which was just written, so that `retain` complete ones are left,
    it included (0: all); returns the deleted steps. Nothing is deleted unless that one has its manifest and every file
    of it in full length; later ones, which a run resumed from further back will overwrite, are left."""
    if not retain or size_faults(run.checkpoint(step)):
        return []
    before = [number for number in run.checkpoint_steps() if number < step]
    complete = [number for number in before if not size_faults(run.checkpoint(number))]
    stay = complete[-(retain - 1) :] if retain > 1 else []
    gone = [number for number in before if number not in stay]
    for number in gone:
        remove_folder(run.checkpoint(number))
    return gone


def newest(run: Run, ranks: Consensus, say: Callable[[str], None] = lambda text: None) -> int:
    """The step of the newest undamaged checkpoint, or 0; the main rank names those that it skips."""
    steps, passed = ranks.broadcast([0, *run.checkpoint_steps()]), []
    while (step := steps.pop()) and (damage := _damage(run.checkpoint(step), ranks)):
        passed.append(f"checkpoint {step} of run {run.name} is damaged ({damage[0]})")
    for text in passed if ranks.is_main else ():
        say(f"{text}; the run {f'continues from step {step:,}' if step else 'starts from the beginning'}")
    return step


def _damage(folder: Path, ranks: Consensus) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank; each rank reads a share."""
    faults = ranks.broadcast(size_faults(folder))
    if faults:
        return faults
    changed = ranks.run_on_all(lambda: content_faults(folder, share=ranks.rank, of=ranks.size))
    return [each for part in ranks.gather(changed) for each in part]


class _Writer(dcp.FileSystemWriter):
    """Raises the disk's own error: torch's stream only reports a wrong position."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)

    def write_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super().write_data(*args, **options)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror) from error
            raise


@contextmanager
def _plain(folder: Path) -> Any:
    """Disk errors as one line, wherever in torch they come from."""
    try:
        yield
    except CheckpointException as error:
        _say(next(iter(error.failures.values()))[0], folder, error)
    except OSError as error:
        _say(error, folder, error)
    except ArmillaryError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        _say(error.__cause__, folder, error)


def _say(first: BaseException, folder: Path, error: BaseException) -> NoReturn:
    if not isinstance(first, OSError):
        raise RuntimeError(f"checkpoint {folder}: {first!r}") from error
    if first.errno in _FULL:
        raise ArmillaryError(
            f"disk full while writing a checkpoint to {folder.parent}; free some space and train again: "
            "the run continues from the last complete one"
        ) from error
    raise ArmillaryError(
        f"cannot write a checkpoint to {folder.parent} ({first.strerror}); check the disk and train again"
    ) from error


@contextmanager
def _quiet() -> Any:
    """torch warns that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield
