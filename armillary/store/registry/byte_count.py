"""Counts bytes of several threads towards one progress callback."""

import threading

from armillary.store.progress import Progress


class ByteCount:
    """Call it with the bytes just done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> None:
        with self._lock:
            self._done += number
            self._progress(min(self._done, self._total), self._total)

    def rest(self, done: int, total: int) -> None:
        """A later phase of the same work as a progress callback: `total` bytes that end at this count's total."""
        with self._lock:
            self._progress(self._total - total + done, self._total)
