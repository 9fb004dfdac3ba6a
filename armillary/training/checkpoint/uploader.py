"""Uploads committed checkpoints beside training: each rank its own files, the main rank the rest, the manifest last.

The main rank decides which checkpoint is next (the newest that waits, after the full one that it needs) and tells the
others through the rendezvous store. A store that fails costs a warning, never the run. In the store, the rules of
retention apply to what is there.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

from armillary.errors import ArmillaryError, one_line
from armillary.parallel.consensus import Consensus
from armillary.store import nan_safe_json
from armillary.store.manifest import NAME as MANIFEST
from armillary.store.runs import Run
from armillary.training.checkpoint.commit import STATE, Abandoned, StoreChannel
from armillary.training.checkpoint.retention import Entry, Policy, removable
from armillary.training.checkpoint.save_plan import file_name
from armillary.training.checkpoint.shard_writer import ShardWriter
from armillary.training.checkpoint.stored_run import claim, run_url, stored_entry
from armillary.training.checkpoint.upload import (
    Part,
    begun_steps,
    complete_steps,
    remove,
    upload_files,
    write_manifest,
)


class Uploader:
    """Of one rank, for checkpoints of `run` to `url`; every rank has one."""

    def __init__(self, run: Run, url: str, ranks: Consensus, channel: StoreChannel, policy: Policy) -> None:
        self._run, self._ranks, self._channel, self._policy = run, ranks, channel, policy
        self.url, self._store = run_url(url, run), url
        self._process: ShardWriter | None = None
        self._in_process = url.startswith("memory:")  # is there for one process only
        self._changed = threading.Condition()
        self._waiting: dict[int, int | None] = {}  # step -> the full checkpoint that it needs
        self._current: set[int] = set()
        self._uploaded: set[int] = set()
        self._stored: dict[int, Entry | None] = {}  # what is known of checkpoints in the store
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
            try:
                self._make_place(step)
                number += 1
                self._channel.put(f"upload/{number}", step)
                self._upload_all(step, number)
                self._thin_out(step)
            except Abandoned:
                return
            except Exception as error:
                self._give_up(step, error)
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

    def _make_place(self, step: int) -> None:
        """The folder is the run's. A checkpoint of that step, which the run has now taken again, goes, after the deltas
        that need it."""
        claim(self._run, self._store)
        there = complete_steps(self.url)
        if step in there:
            deltas = [entry.step for entry in self._entries(there) if entry.base == step]
            for number in (*deltas, step):
                remove(f"{self.url}/{number}")
                self._stored.pop(number, None)

    def _entries(self, steps: list[int]) -> list[Entry]:
        """What retention has to know of these checkpoints of the store, as far as they say."""
        self._stored |= {number: stored_entry(self.url, number) for number in steps if number not in self._stored}
        return [entry for number in steps if (entry := self._stored[number]) is not None]

    def _give_up(self, step: int, error: Exception) -> None:
        """Also on deltas that need this one."""
        why = str(error) if isinstance(error, ArmillaryError) else repr(error)
        self._notes.append(f"checkpoint {step} is on the local disk only: {why}")
        with self._changed:
            needing = [number for number, base in self._waiting.items() if base == step]
            for number in needing:
                del self._waiting[number]
        self._notes += [f"checkpoint {number} is on the local disk only: it needs {step}" for number in needing]

    def _upload_all(self, step: int, number: int) -> None:
        sent, error = self._attempt(step)
        for rank in range(1, self._ranks.size):
            more, failed = self._channel.take(f"upload/{number}/{rank}")
            self._channel.forget(f"upload/{number}/{rank}")
            sent, error = sent | more, error or failed
        self._channel.forget(f"upload/{number}")
        if error:
            raise ArmillaryError(error)
        manifest, about = (nan_safe_json.read_table(self._run.checkpoint(step) / name) for name in (MANIFEST, STATE))
        entry = Entry(step=step, val_loss=about.get("val_loss"), base=about.get("delta_of"))
        write_manifest(f"{self.url}/{step}", manifest, sent, {"val_loss": entry.val_loss, "base": entry.base})
        self._uploaded.add(step)
        self._stored[step] = entry

    def _thin_out(self, step: int) -> None:
        """Delete what the policy does not keep of what is in the store, which may have come from other machines."""
        try:
            entries, busy = self._entries(begun_steps(self.url)), self.busy
            for number in removable(entries, self._policy, newest=step):
                if number not in busy:
                    remove(f"{self.url}/{number}")
                    del self._stored[number]
        except ArmillaryError as error:
            self._notes.append(f"old checkpoints stay in the store: {error}")

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
        try:
            if self._ranks.is_main:
                names += [path.name for path in folder.glob("*") if path.suffix not in (".distcp", ".delta")]
            paths = [str(folder / name) for name in names if name != MANIFEST and (folder / name).is_file()]
            return self._send(f"{self.url}/{step}", paths), ""
        except ArmillaryError as error:
            return {}, str(error)
        except Exception as error:  # the main rank waits for the answer
            return {}, f"rank {self._ranks.rank} cannot send it ({one_line(repr(error), 200)})"

    def _send(self, url: str, paths: list[str]) -> dict[str, list[Part]]:
        if self._in_process:
            return upload_files(url, paths)
        if self._process is None:
            self._process = ShardWriter()
        done = self._process.ask({"upload": url, "paths": paths})
        if "error" in done:
            raise ArmillaryError(done["error"])
        return {name: [Part(*each) for each in parts] for name, parts in done["parts"].items()}
