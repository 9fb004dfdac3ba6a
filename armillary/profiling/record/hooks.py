"""Hooks of a recording, which torch calls for all modules and optimisers, so that nothing has to be handed in.

They give a trace the names of modules (`blocks.3.attention` around what that module's forward runs) and the number of
weights that optimisers step: torch leaves the shapes of lists beyond thirty tensors out of its traces. Code that
torch.compile made is left alone: a hook would make it compile again.
"""

import sys
import threading
import time
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from armillary.profiling.trace.event_classes import MODULE

_NAMES = {"torch.bfloat16": "c10::BFloat16", "torch.float16": "c10::Half", "torch.float64": "double"}


class ModuleScopes:
    """Between `start` and `stop`, forward passes of modules are annotated with their path in the outermost module."""

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str]] = {}
        self._roots: list[nn.Module] = []
        self._local = threading.local()
        self._handles: list[Any] = []
        self._spans: list[tuple[str, int, int, int]] = []
        """name, thread, start and end in ns since 1970, which is the clock of the trace"""

    def start(self) -> None:
        if not compiled():
            self._handles = [
                modules.register_module_forward_pre_hook(self._before),
                modules.register_module_forward_hook(self._after, always_call=True),
            ]

    def stop(self) -> None:
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
                "name": MODULE + name,
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


class OptimizerSizes:
    """Between `start` and `stop`, every optimiser that takes a step is measured."""

    def __init__(self) -> None:
        self._seen: dict[int, list[dict[str, Any]]] = {}
        self._handle: Any = None

    def start(self) -> None:
        self._handle = optimizers.register_optimizer_step_pre_hook(self._see)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _see(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():  # Dynamo then finds nothing here
            self.see(optimizer)

    def see(self, optimizer: Any) -> None:
        """Measure one; also for those whose steps are followed without our hook."""
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = _lists(optimizer)

    @property
    def lists(self) -> list[dict[str, Any]]:
        """[{"weights": …, "dtype": …}]: one for each list of tensors a step goes over."""
        return [entry for entries in self._seen.values() for entry in entries]


def _lists(optimizer: Any) -> list[dict[str, Any]]:
    """torch steps the tensors of a group together, those of one device and dtype."""
    counts: dict[tuple[int, str, str], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if tensor.grad is not None:
                key = (number, str(tensor.device), str(tensor.dtype))
                counts[key] = counts.get(key, 0) + tensor.numel()
    return [{"weights": count, "dtype": _NAMES.get(dtype, "float")} for (_, _, dtype), count in counts.items()]
