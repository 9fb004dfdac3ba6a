"""Checkpoints: everything a run needs to go on as if it had never stopped, on any layout and any number of ranks.

    checkpoints/STEP/
      __RANK_0.distcp  .metadata   tensors by our names, through torch.distributed.checkpoint
      state.json                   step, loss scale, kernel choices, layout: what is no tensor
      rng.pt                       random state of every rank
      manifest.json                every file with its size; written last

A folder is written under a hidden name and renamed when it is whole, so a folder with a number is a good one. Writing
beside the steps and deleting old ones can be put around `save` and `saved_steps`; nothing else knows the form.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from armillary.errors import ArmillaryError, BadData
from armillary.store import strict_json
from armillary.store.atomic import staged_folder, write_json
from armillary.store.manifest import NAME as MANIFEST
from armillary.store.runs import Run
from armillary.training.agreement import Agreement, attempt
from armillary.training.random_state import random_state, set_random_state

STATE, RANDOM = "state.json", "rng.pt"
VERSION = 1
"""raised when an older armillary could misread what is written"""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was committed."""

    step: int
    """steps done"""
    folder: Path
    """where it is"""
    bytes: int
    """size of all files"""


def save(run: Run, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], ranks: Agreement) -> Saved:
    """Write checkpoint `step`: each rank its part of the tensors, the main rank the rest. All ranks call this, and all
    raise the same line when one of them cannot write; what was there before is then untouched."""
    target, stack = run.checkpoint(step), ExitStack()
    staged = staged_folder(target, overwrite=True)
    folder = ranks.tell(ranks.together(lambda: stack.enter_context(staged) if ranks.is_main else None))
    assert folder is not None
    states = ranks.gather(random_state())
    about = {"version": VERSION, "step": step, "ranks": ranks.size, **facts}
    size, error = attempt(lambda: _write(stack, folder, tensors, about, states, ranks))
    ranks.agree(error)
    return Saved(step=step, folder=target, bytes=ranks.tell(size or 0))


def _write(
    stack: ExitStack, folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any],
    states: list[dict[str, Tensor]], ranks: Agreement,
) -> int:  # fmt: skip
    with _plain(folder), stack:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=_Writer(folder), process_group=ranks.group, no_dist=ranks.size == 1)
        if not ranks.is_main:
            return 0
        torch.save(states, folder / RANDOM)
        write_json(folder / STATE, about)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        write_json(folder / MANIFEST, {"step": about["step"], "files": sizes})
        return sum(sizes.values())


def load(folder: Path, tensors: Mapping[str, Tensor], ranks: Agreement) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint of any layout, put the random state back where the number of ranks is
    the same, and give the facts."""
    about = ranks.together(lambda: read_facts(folder))
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder), process_group=ranks.group,
                     no_dist=ranks.size == 1)  # fmt: skip
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise BadData(f"{folder} is no checkpoint of this model ({_one_line(first)}); name another run") from error
    if about["ranks"] == ranks.size:
        set_random_state(torch.load(folder / RANDOM, weights_only=True)[ranks.rank])
    return about


def read_facts(folder: Path) -> dict[str, Any]:
    about = strict_json.read_table(folder / STATE)
    if about.get("version", 0) > VERSION:
        raise BadData(f"{folder} was written by a newer armillary; upgrade armillary to resume it")
    return about


def kernels_of(run: Run) -> dict[str, str]:
    """The kernels that the newest whole checkpoint was made with: a run that goes on uses the same."""
    steps = saved_steps(run)
    return dict(read_facts(run.checkpoint(steps[-1])).get("kernels", {})) if steps else {}


def saved_steps(run: Run) -> list[int]:
    """Steps with a whole checkpoint, in order; one that lost a file or was cut short does not count."""
    return [step for step in run.checkpoint_steps() if not faults(run.checkpoint(step))]


def faults(folder: Path) -> list[str]:
    """What a checkpoint lacks against its manifest, a few words a file."""
    try:
        files = strict_json.read_table(folder / MANIFEST)["files"]
    except (ArmillaryError, KeyError) as error:
        return [f"no manifest ({error})"]
    return [f"{name} is {_found(folder / name)} bytes, not {size}" for name, size in files.items()
            if _found(folder / name) != size]  # fmt: skip


def _found(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class _Writer(dcp.FileSystemWriter):
    """Says which error of the disk it was, on whatever rank: torch's own stream only tells of a wrong position."""

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
    """Errors of the disk as one line, wherever in torch they come from."""
    try:
        yield
    except CheckpointException as error:
        _say(next(iter(error.failures.values()))[0], folder, error)
    except OSError as error:
        _say(error, folder, error)


def _say(first: BaseException, folder: Path, error: BaseException) -> NoReturn:
    if not isinstance(first, OSError):
        raise RuntimeError(f"checkpoint {folder}: {first!r}") from error
    if first.errno in _FULL:
        place = folder.parent
        raise ArmillaryError(f"disk full while writing a checkpoint to {place}; free some space and train again: "
                             "the run goes on from the last whole one") from error  # fmt: skip
    raise ArmillaryError(f"cannot write a checkpoint to {folder.parent} ({first.strerror}); "
                         "check the disk and train again") from error  # fmt: skip


@contextmanager
def _quiet() -> Any:
    """torch warns that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
