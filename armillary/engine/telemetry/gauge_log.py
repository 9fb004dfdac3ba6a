"""Gauge log of an engine that may run for months: steps are sampled, old records are cut off, no step waits for a disk.

Every request is recorded, and every k-th step, with k such that about 50 steps per second are. A record stands by
itself, so step times can be fitted to any sample of them.
"""

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from armillary.errors import ArmillaryError
from armillary.store.gauges import GaugeWriter

_PER_SECOND = 50
"""step records per second"""
_ALL = 200
"""first steps, which are all recorded: a short run is recorded completely"""
_MOST_BYTES = 24_000_000
"""size of the file beyond which the older half is cut off"""
_MOST_WAITING = 10_000
"""records that wait to be written; where the disk is slower, later ones are dropped"""
_END = None


class GaugeLog:
    """`GaugeLog(writer).record` for an engine; `close` writes what is left."""

    def __init__(
        self, writer: GaugeWriter, *, per_second: float = _PER_SECOND, first: int = _ALL, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._writer, self._most_bytes = writer, most_bytes
        self._per_second, self._first = per_second, first
        self._queue: queue.Queue[tuple[Mapping[str, Any], int | None, str | None, float] | None] = queue.Queue(
            _MOST_WAITING
        )
        self.every = 1
        """one in so many steps is recorded"""
        self._lasting: list[Mapping[str, Any]] = []
        """records of neither a step nor a request: written again when old ones are cut off"""
        self._seen = 0
        self._counted, self._since = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, gauges: Mapping[str, Any], *, step: int | None = None, request: str | None = None) -> None:
        """Called in the engine's thread; never blocks."""
        if step is not None and not self._takes():
            return
        try:
            self._queue.put_nowait((gauges, step, request, time.time()))
        except queue.Full:
            return

    def _takes(self) -> bool:
        """Whether this step is recorded; the rate is adapted about once a second."""
        self._seen += 1
        self._counted += 1
        now = time.monotonic()
        if now - self._since >= 1.0:
            wanted = self._counted / (now - self._since) / self._per_second
            self.every = max(1, round(wanted))
            self._counted, self._since = 0, now
        return self._seen <= self._first or not self._seen % self.every

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._queue.put(_END)
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not _END:
            gauges, step, request, now = entry
            if step is None and request is None:
                self._lasting.append(gauges)
            try:
                self._writer.write(gauges, step=step, request=request, now=now)
                for lasting in self._lasting if self._writer.keep_last(self._most_bytes) else ():
                    self._writer.write(lasting)
            except ArmillaryError:  # a full disk does not stop the engine; later records may fit
                continue
