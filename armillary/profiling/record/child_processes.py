"""Child processes that a script starts: they are not recorded, and the profile of the waiting parent says so."""

import functools
import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_HELPED = ("/torch/_inductor/", "/torch/utils/data/", "/triton/runtime/", "/triton/backends/", "/triton/compiler/")
"""parts of torch that start helpers of their own: to compile, and to load"""


class ChildProcesses:
    """Counts, between `watch` and `release`, the Python processes that are started, torch's own helpers left out."""

    def __init__(self) -> None:
        self.count = 0
        self._start, self._popen = BaseProcess.start, subprocess.Popen.__init__

    def watch(self) -> None:
        @functools.wraps(self._start)
        def start(process: Any) -> None:
            self.count += not _helper()
            self._start(process)

        @functools.wraps(self._popen)
        def popen(process: Any, args: Any, *rest: Any, **options: Any) -> None:
            self.count += _is_python(args) and not _helper()
            self._popen(process, args, *rest, **options)

        BaseProcess.start = start  # type: ignore[method-assign, assignment]
        subprocess.Popen.__init__ = popen  # type: ignore[method-assign, assignment]

    def release(self) -> None:
        BaseProcess.start = self._start  # type: ignore[method-assign]
        subprocess.Popen.__init__ = self._popen  # type: ignore[method-assign]


def _is_python(args: Any) -> bool:
    words = args.split() if isinstance(args, str) else args if isinstance(args, list | tuple) else []
    return bool(words) and Path(os.fsdecode(words[0])).name.startswith("python")


def _helper() -> bool:
    """Whether torch itself starts the process, for its own ends."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if any(part in frame.f_code.co_filename.replace(os.sep, "/") for part in _HELPED):
            return True
        frame = frame.f_back
    return False
