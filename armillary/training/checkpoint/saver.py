"""Saves checkpoints while training continues.

`save` starts copying this rank's tensors into its staging buffer and returns; a thread then has the buffer written by
the rank's writer process and reports to the main rank, which commits. One save is in flight at a time.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from armillary.errors import ArmillaryError
from armillary.machine.memory import available_bytes
from armillary.parallel.consensus import Consensus
from armillary.parallel.host_memory import CopyStream, Event
from armillary.store.runs import Run
from armillary.store.writer_process import machine
from armillary.training.checkpoint import save_plan
from armillary.training.checkpoint.commit import (
    Abandoned,
    Instruction,
    Report,
    StoreChannel,
    commit,
    new_folder,
    refuse_failed,
)
from armillary.training.checkpoint.delta_schedule import DeltaSchedule
from armillary.training.checkpoint.disk_errors import plain_errors
from armillary.training.checkpoint.peer_copies import PeerCopies, small_files
from armillary.training.checkpoint.rank_shard import RankShard
from armillary.training.checkpoint.retention import Policy
from armillary.training.checkpoint.save_in_flight import Saved, SaveInFlight
from armillary.training.checkpoint.save_plan import SavePlan
from armillary.training.checkpoint.staging import Copy, StagingBuffer, fits_memory
from armillary.training.checkpoint.uploader import Uploader
from armillary.training.step.numerics import random_state

VERSION = 1
"""raised when an older armillary could misread what is written"""
AT_ONCE_S = 3.0
"""what a user waits for after a second Ctrl-C"""
LAST_WAIT_S = 10.0
"""a run of several ranks that fails waits so long for a save in flight: the others may be gone"""


def _use_device(device: torch.device) -> None:
    """A thread begins with device 0, on which CUDA would make a context for each rank of the machine."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


class Saver:
    """Of one rank; all ranks make the same calls in the same order."""

    def __init__(
        self,
        run: Run,
        ranks: Consensus,
        *,
        device: torch.device | None = None,
        allowed: Callable[[], None] = lambda: None,
        committed: Callable[[Saved], None] = lambda saved: None,
        full_every: int = 1,
        url: str = "",
        policy: Policy | None = None,
        peers: PeerCopies | None = None,
    ) -> None:
        """`allowed()` raises where nothing may be written: it is called on the main rank before a save and before its
        commit. `committed` is called on the main rank, by another thread, after each commit. Of `full_every`
        checkpoints one is full and the others are deltas of it. They are uploaded to the store `url`, if given, where
        `policy` says which are kept (none: all). `peers` keep those that are saved in memory."""
        self._url, self._policy, self._peers, self._peers_failed = url, policy or Policy(last=0), peers, False
        self._run, self._ranks, self._allowed, self._committed = run, ranks, allowed, committed
        self._deltas = DeltaSchedule(full_every=full_every)
        self._device = device or torch.device("cpu")
        self.stream = CopyStream(self._device)
        self._plan: SavePlan | None = None
        self._making: Future[StagingBuffer] | None = None
        self._buffer: StagingBuffer | None = None
        self._shard: RankShard | None = None
        self._uploader: Uploader | None = None
        self._abandoned = threading.Event()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(self._device,))
        self._last: tuple[SaveInFlight, Future[None]] | None = None
        self._error: ArmillaryError | None = None
        self._done: list[Saved] = []
        self._notes: list[str] = []
        self._count = 0

    # --- called by training

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        *,
        in_memory: bool = False,
        random: dict[str, Tensor] | None = None,
        ready: Event = None,
    ) -> None:
        """Begin checkpoint `step`, on disk or as a peer copy; waits for the one in flight. `random` is the random state
        that belongs to it and `ready` when the device has it, where that is not this moment."""
        begin = time.perf_counter()
        self._join()
        wait_s = time.perf_counter() - begin
        self.prepare(tensors)
        assert self._plan is not None and self._making is not None
        if self._buffer is None:
            self._buffer = self._ranks.run_on_all(self._making.result)
        copy = Copy(self._buffer, self._plan.places, self._device)
        copy.start(tensors, self.stream, ready)
        about = {"version": VERSION, "step": step, "ranks": self._ranks.size, **facts}
        self._count += 1
        save = SaveInFlight(
            step=step,
            number=self._count,
            about=about,
            random=random_state() if random is None else random,
            copy=copy,
            began=begin,
            wait_s=wait_s,
            in_memory=in_memory,
        )
        self._last = save, self._thread.submit(self._finish_save, save)
        save.stall_s += time.perf_counter() - begin

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Plan the saves of the run, and begin to make the buffer; every rank calls this, and only once does it do
        anything."""
        if self._plan is not None:
            return
        ranks = self._ranks
        local = ranks.gather(save_plan.local_chunks(tensors))
        places, size = save_plan.file_layout(save_plan.balance(local)[ranks.rank])
        files = ranks.gather(places)
        token = ranks.broadcast(f"checkpoint/{secrets.token_hex(8)}")
        self._channel = StoreChannel(ranks, token, self._abandoned)
        self._plan = SavePlan(places=places, size=size, files=files)
        self._making = self._thread.submit(self._make_buffer, self._fits_memory(size))
        if self._url:
            self._uploader = Uploader(self._run, self._url, ranks, self._channel, self._policy)

    def _fits_memory(self, size: int) -> bool:
        """Whether the buffers of this machine's ranks, and their copies in memory, are in memory: on all or on none."""
        copies = 0 if self._peers is None else self._peers.copies
        needs = self._ranks.gather((size * (1 + copies), machine(), available_bytes()))
        sizes, machines, available = zip(*needs, strict=True)
        first = machines.index(machines[self._ranks.rank])
        return fits_memory(sizes, machines, self._ranks.rank, available[first])

    def _make_buffer(self, in_memory: bool) -> StagingBuffer:
        assert self._plan is not None
        folder = self._run.checkpoint(0).parent
        with plain_errors(folder / "staging"):
            pin = self._device.type == "cuda"
            return StagingBuffer(self._plan.places, self._plan.size, folder, pin=pin, in_memory=in_memory)

    def hand_over(self, ranks: Consensus) -> None:
        """Another thread saves from now on, with `ranks` that share no process group with the training thread. It saves
        in full, which takes less computing than a delta."""
        self._ranks, self._deltas = ranks, DeltaSchedule()

    def before_update(self) -> None:
        """Called before the tensors change: a copy of them may be under way."""
        if self._last is not None:
            save, _ = self._last
            save.stall_s += save.copy.wait()

    def check(self) -> None:
        """Raises what made a save fail; between steps, where every rank learns of it."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for the save in flight; every rank calls this."""
        self._ranks.run_long("write a checkpoint", self._join_and_check)

    def finish_uploads(self) -> None:
        """Wait until the last checkpoint is in the store; no save may follow. Every rank calls this."""
        if self._uploader is not None:
            self._ranks.run_long("upload a checkpoint", self._uploader.finish)

    def take_saved(self) -> list[Saved]:
        """On the main rank: what was committed since this was last called."""
        done, self._done = self._done, []
        return done

    def take_notes(self) -> list[str]:
        """On the main rank: what there is to say since this was last called."""
        notes, self._notes = self._notes, []
        return notes + (self._uploader.take_notes() if self._uploader is not None else [])

    @property
    def may_copy(self) -> bool:
        """On the main rank: whether a peer copy would neither wait nor fail as the last one did."""
        idle = self._last is None or self._last[1].done()
        return self._peers is not None and not self._peers_failed and idle

    @property
    def busy(self) -> set[int]:
        """Steps whose files are still needed, for uploads."""
        return self._uploader.busy if self._uploader is not None else set()

    def close(self, *, failed: bool = False, at_once: bool = False) -> None:
        """End the writer process. A run that failed still completes a save in flight, if that is quick or it is alone
        and need not end at once."""
        if self._last is not None:
            several = self._ranks.size > 1
            with suppress(Exception):
                self._last[1].result(AT_ONCE_S if at_once else LAST_WAIT_S if failed and several else None)
        self._abandoned.set()
        if self._shard is not None:
            self._shard.close(kill=at_once or (self._last is not None and not self._last[1].done()))
        if self._last is not None:
            wait([self._last[1]], timeout=2.0)
            if not self._last[1].done():  # in a transfer to a rank that is gone, which ends with the process group
                self._thread.shutdown(wait=False)
                return
        self._thread.shutdown(wait=True)
        if self._uploader is not None:
            self._uploader.close()
        if self._making is not None and not self._making.exception():
            self._making.result().close()

    def wait(self) -> None:
        """Wait for the save in flight on this rank alone."""
        self._join_and_check()

    def _join(self) -> None:
        if self._last is not None:
            self._last[1].result()

    def _join_and_check(self) -> None:
        self._join()
        self.check()

    # --- in the thread

    def _finish_save(self, save: SaveInFlight) -> None:
        """Copy, write, report; on the main rank also commit. An error is kept until the next step."""
        try:
            save.copy.run()
            if self._ranks.is_main:
                self._commit(save)
            else:
                self._take_part(save)
        except Abandoned:
            return
        except ArmillaryError as error:
            if save.in_memory:
                self._peers_failed = True
                self._notes.append(f"no more copies are kept in memory: {error}")
            else:
                self._error = error
        except Exception as error:  # of the store, or a bug: training must not go on without checkpoints silently
            self._error = ArmillaryError(f"checkpoint {save.step} failed ({error!r}); train again: the run continues")

    def _commit(self, save: SaveInFlight) -> None:
        """On the main rank: tell the others where to write, wait for all, and give the folder its name."""
        assert self._plan is not None
        key, begun = f"{save.number}/begin", None if save.in_memory else self._deltas.next_base(self._run)
        target = self._home(save).checkpoint(save.step)
        try:
            with new_folder(target, self._allowed) as (folder, stack):
                instruction = Instruction(folder=folder, base=begun)
                self._channel.put(key, instruction)
                self._write_and_report(save, instruction)
                reports = [self._channel.take(f"{save.number}/{rank}") for rank in range(self._ranks.size)]
                self._channel.forget(f"{save.number - 1}/committed")  # who reports this save is through with that one
                refuse_failed(reports)
                self._allowed()
                about = save.about | ({} if begun is None else {"delta_of": begun})
                places = None if begun is None else [report.places for report in reports]
                size = commit(folder, about, save_plan.metadata(self._plan.files, places), reports, stack.close)
        except BaseException:
            self._channel.put(key, None)  # ranks that wait for it need not
            self._channel.put(f"{save.number}/committed", None)
            raise
        for name in ("begin", *range(self._ranks.size)):
            self._channel.forget(f"{save.number}/{name}")
        if self._peers is not None and save.in_memory:
            self._channel.put(f"{save.number}/committed", small_files(target))
            self._peers.forget_before(save.step)
        else:
            self._count_saved(save, begun, size)

    def _take_part(self, save: SaveInFlight) -> None:
        """On the other ranks: write what the main rank asks for, and for a peer copy complete this machine's part."""
        instruction = self._channel.take(f"{save.number}/begin")
        self._write_and_report(save, instruction)
        if self._peers is not None and save.in_memory and instruction is not None:
            small = self._channel.take(f"{save.number}/committed")
            self._peers.commit(self._peers.place(instruction.folder), save.step, small)

    def _home(self, save: SaveInFlight) -> Run:
        return self._peers.run if self._peers is not None and save.in_memory else self._run

    def _count_saved(self, save: SaveInFlight, base: int | None, size: int) -> None:
        assert self._plan is not None
        fraction = 0.0 if base is None else max(0.0, 1.0 - size / self._plan.total_bytes)
        saved = Saved(
            step=save.step,
            folder=self._run.checkpoint(save.step),
            bytes=size,
            seconds=time.perf_counter() - save.began,
            stall_s=save.stall_s + save.copy.device_wait_s(),
            wait_s=save.wait_s,
            delta_of=base,
            saved_fraction=fraction,
        )
        self._notes += filter(None, [self._deltas.committed(save.step, base, fraction)])
        if self._uploader is not None:
            self._uploader.add(save.step, base)
        self._done.append(saved)
        try:
            self._committed(saved)
        except (ArmillaryError, OSError) as error:  # the checkpoint is there: whatever else fails is no reason to stop
            self._notes.append(f"old checkpoints are not deleted: {error}")

    def _write_and_report(self, save: SaveInFlight, instruction: Instruction | None) -> None:
        if instruction is None:
            return
        assert self._plan is not None and self._buffer is not None
        if self._shard is None:  # by this thread, with which its process ends
            self._shard = RankShard(self._run, self._ranks.rank, self._plan, self._buffer, self._peers)
        try:
            report = self._shard.write(save, instruction)
        except ArmillaryError as error:
            report = Report(files={}, random=save.random, error=str(error))
        self._channel.put(f"{save.number}/{self._ranks.rank}", report)
