"""Ctrl-C and SIGTERM as a request to stop after the current step, so that what was learnt is kept.

A second Ctrl-C stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """`with StopRequest() as stop: while not stop.asked(): …`; handlers are put back at the end."""

    def __init__(self, parent: int = 0, also: Callable[[], bool] | None = None) -> None:
        """`parent`, where given, is the process that started this one: its end is a request to stop, too, and so is
        what `also()` says."""
        self._asked, self._parent, self._also = False, parent, also
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        orphaned = bool(self._parent and os.getppid() != self._parent)
        return self._asked or orphaned or (self._also is not None and self._also())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
