"""Detecting the ends of a script's steps from outside: optimiser steps, else repeated calls without a gradient.

Dynamo compiles hooks into what it traces, so those on all modules are removed before anything is compiled; then the
result of torch.compile is followed instead. The hook on optimisers stays, empty to Dynamo, as removing it would compile
an optimiser's step again.
"""

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

What = Literal["run", "forward", "compiled", "optimizer"]


class StepDetector:
    """Calls `ended(optimizer or None)` after each step, `restart()` when the steps so far were not the script's steps,
    and `compiling()` before the first thing is compiled."""

    def __init__(
        self, *, ended: Callable[[Any], None], restart: Callable[[], None], compiling: Callable[[], None]
    ) -> None:
        self.what: What = "run"
        """whose end is a step: an optimiser's step, a forward pass, a compiled call, or none but the run's"""
        self.compiled = False
        """whether the script compiles anything"""
        self._ended, self._restart, self._compiling = ended, restart, compiling
        self._owner: Any = None
        self._called_once: WeakSet[Any] = WeakSet()
        self._local = threading.local()
        self._handles: list[Any] = []
        self._optimizer_handle: Any = None
        self._replaced: list[tuple[Any, str, Any]] = []
        """holder, name and what was there"""
        self._compile = torch.compile
        self._over = False

    def watch(self) -> None:
        self._optimizer_handle = optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._handles = [
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(self._after_forward, always_call=True),
        ]
        self._replace(torch, "compile", self._following_compile)
        self._replace(torch.export, "export", self._freeing(torch.export.export))
        after_import("torch._dynamo", self._free_before_dynamo)

    def release(self) -> None:
        """Stop following the script's steps."""
        self._over, self._owner = True, None
        for holder, name, plain in self._replaced:
            setattr(holder, name, plain)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not self.compiled and self._optimizer_handle is not None:
            self._optimizer_handle.remove()

    # --- eager code

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Only the first optimiser ends steps: a script with two takes one step with both."""
        if torch.compiler.is_compiling() or self._over:
            return
        if self.what != "optimizer":
            if self._owner is not None:
                self._restart()
            self._owner, self.what = optimizer, "optimizer"
        if optimizer is self._owner:
            self._ended(optimizer)

    def _before_forward(self, module: Any, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._local.depth = self._depth() + 1

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._local.depth = max(0, self._depth() - 1)
            if not torch.is_grad_enabled():
                self._called(module, "forward")

    def _depth(self) -> int:
        depth: int = getattr(self._local, "depth", 0)
        return depth

    def _called(self, whose: Any, what: What) -> None:
        """The first thing that is called twice from outermost ends steps: one call alone is a run, not a loop."""
        if self._over or self._depth() or self.what == "optimizer":
            return
        if self._owner is None and whose in self._called_once:
            self._owner, self.what = whose, what
        self._called_once.add(whose)
        if whose is self._owner:
            self._ended(None)

    # --- compiled code

    def _following_compile(self, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is None:  # as a decorator with options: it comes back here with the function
            return self._compile(model, *args, **kwargs)
        self._free()
        compiled = self._compile(model, *args, **kwargs)
        if isinstance(compiled, torch.nn.Module):
            compiled.register_forward_pre_hook(self._before_forward)
            compiled.register_forward_hook(self._after_forward, always_call=True)
            return compiled
        if not hasattr(compiled, "_torchdynamo_orig_callable"):
            return compiled
        in_place = isinstance(getattr(model, "__self__", None), torch.nn.Module)  # module.compile()
        return self._followed(compiled, "forward" if in_place else "compiled")

    def _followed(self, compiled: Any, what: What) -> Any:
        """The compiled function, with its calls reported; Dynamo sees through the wrapper."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._local.depth = self._depth() + 1
            try:
                result = compiled(*args, **kwargs)
            finally:
                self._local.depth = max(0, self._depth() - 1)
            if not _needs_gradient(result):
                self._called(call, what)
            return result

        call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
        return call

    def _free_before_dynamo(self, dynamo: Any) -> None:
        """For scripts that use Dynamo without torch.compile."""
        if not self._over:
            self._replace(dynamo, "optimize", self._freeing(dynamo.optimize))
            self._replace(dynamo, "export", self._freeing(dynamo.export))

    def _freeing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._free()
            return plain(*args, **kwargs)

        return call

    def _replace(self, holder: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace a function until `release`; name and signature stay."""
        plain = getattr(holder, name)

        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        self._replaced.append((holder, name, plain))
        setattr(holder, name, function)

    def _free(self) -> None:
        """Remove the hooks on all modules for good."""
        if self.compiled or self._over:
            return
        self.compiled = True
        self._local.depth = 0
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._compiling()


def _needs_gradient(result: Any) -> bool:
    """Whether a backward pass is to follow: then the call is part of a step."""
    if isinstance(result, torch.Tensor):
        return bool(result.requires_grad)
    if isinstance(result, dict):
        return any(map(_needs_gradient, result.values()))
    return isinstance(result, list | tuple) and any(map(_needs_gradient, result))


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call `then(module)` now if the module is imported already, else at the end of its import, should it ever come:
    torch's compiler takes seconds to import."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(MetaPathFinder):
    """Finds nothing itself: the other finders find the module, and `then` is called once it is loaded."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
