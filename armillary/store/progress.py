"""Progress callbacks in bytes, and a tqdm class that reports to one.

The command line passes a callback that moves its own bar; libraries that draw tqdm bars report to it too.
"""

import io
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

Progress = Callable[[int, int], None]
"""called with bytes done and total bytes known so far"""


def silent(done: int, total: int) -> None:
    """No progress."""


def reporting_bar(progress: Progress) -> type[Any]:
    """A tqdm class that draws nothing and reports its bytes to `progress`.

    A download may keep several bars over the same bytes (received, written); the most advanced one counts.
    """
    base: Any = import_module("tqdm.std").tqdm
    bars: list[Any] = []

    def start(self: Any, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        base.__init__(self, *args, **(options | {"disable": False, "file": io.StringIO()}))
        if self.unit == "B":
            bars.append(self)

    def display(self: Any, *_: Any, **__: Any) -> bool:
        total = int(max((bar.total or 0 for bar in bars), default=0))
        if total:  # no report where nothing is downloaded
            progress(int(max(bar.n for bar in bars)), total)
        return True

    # No monitor thread, and a lock of its own: tqdm's default one starts a helper process.
    own = {"__init__": start, "display": display, "monitor_interval": 0, "_lock": threading.RLock()}
    return type("ReportingBar", (base,), own)
