"""Records of an engine that may run for months: steps are sampled, old records are cut off, no step waits for a disk.

Of requests every one is recorded; of steps every k-th, k following the pace so that some 50 a second are. A record is
whole by itself, so that what steps cost can be fitted to any of them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from armillary.errors import ArmillaryError
from armillary.store.gauges import GaugeWriter

_A_SECOND = 50
"""records of steps"""
_ALL = 200
"""steps at the beginning that are all recorded: a short run is known whole"""
_MOST_BYTES = 24_000_000
"""of the file; beyond it the older half is cut off"""
_MOST_WAITING = 10_000
"""records that wait to be written; where a disk is slower than that, later ones are lost"""
_END = None


class GaugeLog:
    """`GaugeLog(writer).record` for an engine; `close` writes what is left."""

    def __init__(
        self, writer: GaugeWriter, *, a_second: float = _A_SECOND, whole: int = _ALL, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._writer, self._most_bytes = writer, most_bytes
        self._a_second, self._whole = a_second, whole
        self._queue: queue.Queue[tuple[Mapping[str, Any], int | None, str | None, float] | None] = queue.Queue(
            _MOST_WAITING
        )
        self.every = 1
        """of the steps, which are recorded"""
        self._lasting: list[Mapping[str, Any]] = []
        """records of neither a step nor a request: they stay when old ones are cut off"""
        self._seen = 0
        self._counted, self._since = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, gauges: Mapping[str, Any], *, step: int | None = None, request: str | None = None) -> None:
        """In the engine's thread; never waits."""
        if step is not None and not self._takes():
            return
        try:
            self._queue.put_nowait((gauges, step, request, time.time()))
        except queue.Full:
            return

    def _takes(self) -> bool:
        """Whether this step is recorded; the pace is looked at about once a second."""
        self._seen += 1
        self._counted += 1
        now = time.monotonic()
        if now - self._since >= 1.0:
            wanted = self._counted / (now - self._since) / self._a_second
            self.every = max(1, round(wanted))
            self._counted, self._since = 0, now
        return self._seen <= self._whole or not self._seen % self.every

    def close(self) -> None:
        """Write what waits, and let the file go."""
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
            except ArmillaryError:  # a full disk is no reason not to answer; what comes later may find room
                continue
