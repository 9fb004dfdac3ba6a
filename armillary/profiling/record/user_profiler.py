"""The script's own profiler: torch allows one recording at a time, so ours yields to it.

Every way of torch to record (torch.profiler, torch.autograd.profiler, nvtx ranges) begins and ends in the same few
functions, which are followed here.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler

_BEGIN = ("_prepare_profiler", "_enable_profiler")
_END = "_disable_profiler"


class UserProfiler:
    """Calls `begins()` before a recording begins that is not made within `ours()`."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self.met = False
        """whether the script has recorded anything"""
        self._begins = begins
        self._running = False
        self._ours = False
        self._plain = {name: getattr(profiler, name) for name in (*_BEGIN, _END)}

    def watch(self) -> None:
        for name in _BEGIN:
            setattr(profiler, name, self._following(name, self._begin))
        setattr(profiler, _END, self._following(_END, self._end))

    def release(self) -> None:
        for name, function in self._plain.items():
            setattr(profiler, name, function)

    @property
    def running(self) -> bool:
        return self._running or torch.autograd._profiler_enabled()

    @contextmanager
    def ours(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _following(self, name: str, report: Callable[[], None]) -> Callable[..., Any]:
        plain = self._plain[name]

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._ours:
                report()
            return plain(*args, **kwargs)

        return call

    def _begin(self) -> None:
        if not self._running:
            self._running = self.met = True
            self._begins()

    def _end(self) -> None:
        self._running = False
