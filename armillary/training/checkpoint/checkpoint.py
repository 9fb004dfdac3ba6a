"""Checkpoints: everything a run needs to resume as if it had never stopped, on any layout and number of ranks.

    checkpoints/STEP/
      __RANK_0.distcp  .metadata   tensors by our names, through torch.distributed.checkpoint
      state.json                   step, loss scale, kernel choices, layout: everything but tensors
      rng.pt                       random state of every rank
      manifest.json                every file with its size and checksum; written last

A folder is written under a hidden name and renamed when it is complete, so a folder with a number is complete. Old
ones are deleted (`prune`) once a newer one is complete and on disk.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from armillary.errors import ArmillaryError, BadData, Unreadable, one_line
from armillary.parallel.consensus import Consensus
from armillary.store import nan_safe_json
from armillary.store.atomic import remove_folder
from armillary.store.manifest import content_faults, retry_read, size_faults
from armillary.store.runs import Run
from armillary.training.checkpoint.commit import RANDOM, STATE
from armillary.training.checkpoint.delta_reader import DeltaReader
from armillary.training.checkpoint.disk_errors import plain_errors
from armillary.training.checkpoint.peer_copies import gather_newest, memory_run
from armillary.training.checkpoint.retention import Entry, Policy, removable
from armillary.training.checkpoint.save_in_flight import Saved
from armillary.training.checkpoint.saver import VERSION, Saver
from armillary.training.checkpoint.stored_chunks import read_shards
from armillary.training.checkpoint.stored_run import fetch_newest
from armillary.training.step.numerics import set_random_state


def save(
    run: Run,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    ranks: Consensus,
    allowed: Callable[[], None] = lambda: None,
) -> Saved:
    """Write checkpoint `step` and wait for it. All ranks call this, and all raise the same error when one of them
    cannot write; older checkpoints are then untouched."""
    saver = Saver(run, ranks, allowed=allowed)
    try:
        saver.save(step, tensors, facts)
        saver.finish()
        (saved,) = ranks.broadcast(saver.take_saved())
        return saved
    finally:
        saver.close()


def load(folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus, machines: Sequence[str] = ()) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint of any layout, put the random state back where the number of ranks is
    the same, and give the facts. All ranks call this, and all raise the same line when one of them cannot read. With
    the machine of each rank, every byte is read once per machine."""
    about = ranks.run_on_all(lambda: read_facts(folder))
    ranks.run_on_all(lambda: read_tensors(folder, tensors, ranks, machines))
    if about["ranks"] == ranks.size:
        set_random_state(torch.load(folder / RANDOM, weights_only=True)[ranks.rank])
    return about


def read_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus, machines: Sequence[str] = ()) -> None:
    """Fill tensors, which may be a part of those in the checkpoint, in place. A rank reads the bytes of its own shards;
    deltas, and files that another program wrote in another form, are read by torch's own reader."""
    if base_of(folder) is not None or read_shards(folder, tensors, ranks, machines) is None:
        _read_chunks(folder, tensors, ranks)


def _read_chunks(folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus) -> None:
    """By torch's reader, or ours of deltas: every chunk that a rank needs a part of, in full."""
    try:
        with _quiet():
            dcp.load(
                dict(tensors),
                storage_reader=open_reader(folder),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise BadData(f"{folder} is no checkpoint of this model ({one_line(first, 200)}); name another run") from error


def open_reader(folder: Path) -> dcp.FileSystemReader:
    """torch's reader of a checkpoint, or ours of a delta and its full checkpoint."""
    base = base_of(folder)
    return dcp.FileSystemReader(folder) if base is None else DeltaReader(folder, base)


def base_of(folder: Path) -> Path | None:
    """The full checkpoint that a delta needs; None where it is full itself, or cannot be read."""
    try:
        base = read_facts(folder).get("delta_of")
    except Unreadable:
        raise
    except ArmillaryError:
        return None
    return None if base is None else folder.with_name(str(base))


def missing_parts(folder: Path) -> list[str]:
    """Files of a checkpoint, or of the one it is a delta of, that are not there in full length."""
    base = base_of(folder)
    needed = [] if base is None else [f"{fault} in {base.name}, its full checkpoint" for fault in size_faults(base)]
    return size_faults(folder) + needed


def read_facts(folder: Path) -> dict[str, Any]:
    about = retry_read(folder / STATE, nan_safe_json.read_table)
    if about.get("version", 0) > VERSION:
        raise BadData(f"{folder} was written by a newer armillary; upgrade armillary to resume it")
    return about


def kernels_of(run: Run, step: int) -> dict[str, str]:
    """The kernels of a checkpoint, which a resumed run uses too."""
    return dict(read_facts(place_of(run, step)).get("kernels", {})) if step else {}


def saved_steps(run: Run) -> list[int]:
    """Steps with a complete checkpoint, in order; one with a missing or truncated file does not count. Contents are not
    read: `newest` reads them."""
    return [step for step in run.checkpoint_steps() if not missing_parts(run.checkpoint(step))]


def entry(run: Run, step: int) -> Entry:
    """What retention has to know about a checkpoint."""
    folder = run.checkpoint(step)
    try:
        about = read_facts(folder)
    except Unreadable:
        raise
    except ArmillaryError:
        about = {}
    value, base = about.get("val_loss"), about.get("delta_of")
    return Entry(step=step, complete=not missing_parts(folder), val_loss=value, base=base)


def prune(run: Run, policy: Policy, step: int | None = None, *, busy: Collection[int] = ()) -> list[int]:
    """Delete the checkpoints that the policy does not keep and that are not `busy`; returns their steps. `step` is the
    one that was just written: nothing is deleted unless it has its manifest and every file of it in full length; later
    ones, which a run resumed from further back will overwrite, are left."""
    entries = [entry(run, number) for number in run.checkpoint_steps()]
    gone = [number for number in removable(entries, policy, newest=step) if number not in busy]
    for number in gone:
        remove_folder(run.checkpoint(number))
    return gone


def newest(
    run: Run,
    ranks: Consensus,
    say: Callable[[str], None] = lambda text: None,
    *,
    url: str = "",
    copies: bool = False,
) -> int:
    """The step of the newest undamaged checkpoint, or 0. Damaged ones are renamed, so that nothing uses them, and the
    main rank names them. Newer ones of the store `url` are fetched, and of peer `copies` the newest is used."""
    steps, damaged = ranks.broadcast([0, *run.checkpoint_steps()]), []
    while (step := steps.pop()) and (damage := _damage(run.checkpoint(step), ranks)):
        damaged.append((step, damage[0]))
    places = ranks.run_on_all(lambda: [quarantine(run, number) for number, _ in damaged] if ranks.is_main else [])
    if url:
        step = max(step, _from_store(run, url, ranks, say, newer_than=step, lost=bool(damaged)))
    continues = f"continues from step {step:,}" if step else "starts from the beginning"
    for (number, fault), place in zip(damaged, places, strict=False):
        say(f"checkpoint {number} of run {run.name} is damaged ({fault}), kept as {place.name}; the run {continues}")
    return (_newest_copy(run, ranks, step, say) if copies else 0) or step


def _from_store(
    run: Run, url: str, ranks: Consensus, say: Callable[[str], None], *, newer_than: int, lost: bool
) -> int:
    def fetch() -> int:
        return fetch_newest(run, url, say, newer_than=newer_than, lost=lost) if ranks.is_main else 0

    return ranks.broadcast(ranks.run_long("fetch a checkpoint", fetch))


def _newest_copy(run: Run, ranks: Consensus, step: int, say: Callable[[str], None]) -> int:
    """The step of a peer copy that is newer than the checkpoint of `step` and of the same history, or 0."""
    step_in_memory = gather_newest(run, ranks, newer_than=step)
    if not step_in_memory or _damage(memory_run(run).checkpoint(step_in_memory), ranks):
        return 0
    before = read_facts(run.checkpoint(step)).get("restarts_total", 0) if step else 0
    if ranks.broadcast(read_facts(memory_run(run).checkpoint(step_in_memory)).get("restarts_total", 0) < before):
        return 0
    if ranks.is_main:
        say(f"the run continues from step {step_in_memory:,}, which is still in memory")
    return step_in_memory


def place_of(run: Run, step: int) -> Path:
    """The folder of a checkpoint on disk, or of a peer copy in memory."""
    folder = run.checkpoint(step)
    return folder if folder.exists() else memory_run(run).checkpoint(step)


def quarantine(run: Run, step: int) -> Path:
    """Rename a damaged checkpoint to STEP.damaged, which nothing reads and nothing deletes."""
    folder = run.checkpoint(step)
    names = (f"{step}.damaged{number}" for number in ("", *(f"-{count}" for count in range(2, 1000))))
    place = next(place for name in names if not (place := folder.with_name(name)).exists())
    with plain_errors(folder):
        folder.rename(place)
    return place


def faults(run: Run, step: int) -> list[str]:
    """What is wrong with a checkpoint, a few words per file; every file is read."""
    return _damage(run.checkpoint(step), Consensus(rank=0, size=1))


def _damage(folder: Path, ranks: Consensus) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank; each rank reads a share."""
    seen = ranks.run_on_all(lambda: (missing_parts(folder), base_of(folder)) if ranks.is_main else ([], None))
    sizes, base = ranks.broadcast(seen)
    if sizes:
        return sizes
    parts = [folder] if base is None else [folder, base]
    changed = ranks.run_on_all(
        lambda: [fault for part in parts for fault in content_faults(part, share=ranks.rank, of=ranks.size)]
    )
    return [each for part in ranks.gather(changed) for each in part]


@contextmanager
def _quiet() -> Any:
    """torch warns that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield
