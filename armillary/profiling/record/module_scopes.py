"""The names of modules in a trace: `blocks.3.attention` around what that module's forward runs.

Hooks that torch calls for every module are put in place for the window only, so that nothing has to be handed in. Code
that torch.compile made is left alone: a hook would make it compile again.
"""

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as hooks

PREFIX = "nn.Module: "
"""what such an annotation begins with, as in torch's own stacks"""


class ModuleScopes:
    """While entered, forward passes of modules are annotated with their path in the outermost module."""

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str]] = {}
        self._roots: list[nn.Module] = []
        self._local = threading.local()
        self._handles: list[Any] = []
        self._spans: list[tuple[str, int, int, int]] = []
        """name, thread, start and end in ns since 1970, which is the clock of the trace"""

    def __enter__(self) -> Self:
        if not compiled():
            self._handles = [
                hooks.register_module_forward_pre_hook(self._before),
                hooks.register_module_forward_hook(self._after, always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stack(self) -> list[tuple[nn.Module, nn.Module, int]]:
        """(module, its outermost module, since when) of what this thread is in."""
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.thread = [], threading.get_native_id()
        stack: list[tuple[nn.Module, nn.Module, int]] = self._local.stack
        return stack

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if is_compiling():  # Dynamo then finds nothing here
            return
        stack = self._stack()
        root = stack[-1][1] if stack else module
        stack.append((module, root, time.time_ns()))

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_compiling():
            return
        now, stack = time.time_ns(), self._stack()
        while stack:  # a forward that raised may have left some behind
            entered, root, start = stack.pop()
            self._spans.append((self._name(root, entered), self._local.thread, start, now))
            if entered is module:
                return

    def events(self, pid: int, base_ns: int) -> list[dict[str, Any]]:
        """Trace events of the form that torch's own stacks have."""
        return [
            {
                "ph": "X",
                "cat": "python_function",
                "name": PREFIX + name,
                "pid": pid,
                "tid": thread,
                "ts": (start - base_ns) / 1e3,
                "dur": (end - start) / 1e3,
            }
            for name, thread, start, end in self._spans
        ]

    def _name(self, root: nn.Module, module: nn.Module) -> str:
        if id(root) not in self._names:
            self._roots.append(root)  # held, so that its id stays its own
            self._names[id(root)] = {id(each): path for path, each in root.named_modules()}
        return self._names[id(root)].get(id(module)) or type(module).__name__


def compiled() -> bool:
    """Whether torch.compile has made anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
