"""Uploads committed checkpoints beside training: each rank its own files, the main rank the rest, the manifest last.

The main rank decides which checkpoint is next (the newest that waits, after the full one that it needs) and tells the
others through the rendezvous store. A store that fails costs a warning, never the run.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.store import nan_safe_json
from armillary.store.manifest import NAME as MANIFEST
from armillary.store.runs import Run
from armillary.training.checkpoint.commit import Abandoned, StoreChannel
from armillary.training.checkpoint.save_plan import file_name
from armillary.training.checkpoint.upload import Part, complete_steps, remove, upload_files, write_manifest
from armillary.training.checkpoint.worker_process import WorkerProcess


class Uploader:
    """Of one rank, for checkpoints of `run` to `url`; every rank has one."""

    def __init__(self, run: Run, url: str, ranks: Consensus, channel: StoreChannel) -> None:
        self._run, self._ranks, self._channel = run, ranks, channel
        self.url = run_url(url, run)
        self._process: WorkerProcess | None = None
        self._in_process = url.startswith("memory:")  # is there for one process only
        self._changed = threading.Condition()
        self._waiting: dict[int, int | None] = {}  # step -> the full checkpoint that it needs
        self._current: set[int] = set()
        self._uploaded: set[int] = set()
        self._notes: list[str] = []
        self._ended = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._done = self._thread.submit(self._lead if ranks.is_main else self._follow)

    # --- on the main rank

    def add(self, step: int, base: int | None) -> None:
        """A checkpoint was committed."""
        with self._changed:
            self._waiting[step] = base
            self._changed.notify_all()

    @property
    def busy(self) -> set[int]:
        """Steps whose files are needed."""
        with self._changed:
            bases = {base for base in self._waiting.values() if base is not None}
            return self._current | set(self._waiting) | bases

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def finish(self) -> None:
        """Wait for all uploads; no more follow. Every rank calls this."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._done.result()

    def close(self) -> None:
        """End the thread; `abandoned` of the channel is set by then."""
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._process is not None:
            self._process.close(kill=not self._done.done())
        self._thread.shutdown(wait=True)

    def _lead(self) -> None:
        number = 0
        while (step := self._next()) is not None:
            number += 1
            try:
                self._channel.put(f"upload/{number}", step)
                self._upload_all(step, number)
            except Abandoned:
                return
            except ArmillaryError as error:
                self._notes.append(f"checkpoint {step} is on the local disk only: {error}")
            finally:
                with self._changed:
                    self._current.discard(step)
        self._channel.put(f"upload/{number + 1}", None)

    def _next(self) -> int | None:
        """The next step to upload; None at the end. Older ones that wait are left out, but for bases."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            if not self._waiting:
                return None
            newest = max(self._waiting)
            base = self._waiting[newest]
            step = newest if base is None or base in self._uploaded else base
            self._waiting = {newest: base} if step != newest else {}
            self._current.add(step)
            return step

    def _upload_all(self, step: int, number: int) -> None:
        sent, error = self._attempt(step)
        for rank in range(1, self._ranks.size):
            more, failed = self._channel.take(f"upload/{number}/{rank}")
            self._channel.forget(f"upload/{number}/{rank}")
            sent, error = sent | more, error or failed
        self._channel.forget(f"upload/{number}")
        if error:
            raise ArmillaryError(error)
        manifest = nan_safe_json.read_table(self._run.checkpoint(step) / MANIFEST)
        write_manifest(f"{self.url}/{step}", manifest, sent)
        self._uploaded.add(step)
        self._thin_out()

    def _thin_out(self) -> None:
        """What is gone here goes there as well."""
        here = {*self._run.checkpoint_steps(), *self.busy}
        for step in complete_steps(self.url):
            if step not in here and step < max(here, default=0):
                remove(f"{self.url}/{step}")

    # --- on every rank

    def _follow(self) -> None:
        number = 1
        try:
            while (step := self._channel.take(f"upload/{number}")) is not None:
                self._channel.put(f"upload/{number}/{self._ranks.rank}", self._attempt(step))
                number += 1
        except Abandoned:
            return

    def _attempt(self, step: int) -> tuple[dict[str, list[Part]], str]:
        """This rank's files in the store, or why they are not there."""
        folder = self._run.checkpoint(step)
        names = [file_name(self._ranks.rank), file_name(self._ranks.rank, delta=True)]
        if self._ranks.is_main:
            names += [path.name for path in folder.glob("*") if path.suffix not in (".distcp", ".delta")]
        paths = [str(folder / name) for name in names if name != MANIFEST and (folder / name).is_file()]
        try:
            return self._send(f"{self.url}/{step}", paths), ""
        except ArmillaryError as error:
            return {}, str(error)

    def _send(self, url: str, paths: list[str]) -> dict[str, list[Part]]:
        if self._in_process:
            return upload_files(url, paths)
        if self._process is None:
            self._process = WorkerProcess()
        done = self._process.ask({"upload": url, "paths": paths})
        if "error" in done:
            raise ArmillaryError(done["error"])
        return {name: [Part(*each) for each in parts] for name, parts in done["parts"].items()}


def run_url(url: str, run: Run) -> str:
    """Where the checkpoints of a run are in a store: by its short name, so that `--run NAME` finds them elsewhere."""
    return f"{url.rstrip('/')}/{run.name}"


def fetch_newer(run: Run, url: str, say: Callable[[str], None]) -> int | None:
    """Copy the newest checkpoint of the store, and the full one that it needs, into the run's folder, where that has
    none as new; returns its step."""
    from armillary.store.atomic import staged_folder
    from armillary.training.checkpoint.upload import fetch

    here, there = run.checkpoint_steps(), complete_steps(run_url(url, run))
    if not there or (here and here[-1] >= there[-1]):
        return None
    wanted: list[int] = [there[-1]]
    while wanted:
        step = wanted.pop()
        if step not in run.checkpoint_steps():
            say(f"fetching checkpoint {step} from {run_url(url, run)}")
            with staged_folder(run.checkpoint(step)) as folder:
                fetch(f"{run_url(url, run)}/{step}", folder)
        base: Any = nan_safe_json.read_table(run.checkpoint(step) / "state.json").get("delta_of")
        wanted += [] if base is None else [int(base)]
    return there[-1]
