"""The torch.compile version of a reference: static shapes, a compiler cache per load."""

import warnings
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch._compile import _disable_dynamo as uncompiled

from armillary.kernels.core.op import LazyFunction, Version


class Compiled(LazyFunction):
    """torch.compile(function) on load. The compiler keeps its cache on a function's code object and gives up after
    eight shapes; a copy of the code per load keeps cases apart."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any] | None = None) -> None:
        self.function, self.options = function, options

    def load(self) -> Callable[..., Any]:
        source: Any = self.function
        code = source.__code__.replace()
        copy = FunctionType(code, source.__globals__, source.__name__, source.__defaults__, source.__closure__)
        copy.__kwdefaults__ = source.__kwdefaults__
        return _quiet(torch.compile(copy, dynamic=False, options=self.options))


def compiled(function: Callable[..., Any]) -> Version:
    """The torch.compile version of an op."""
    return Version(name="compile", run=Compiled(function), needs=("compile",))


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Silence the compiler's warnings about settings that are chosen deliberately (tf32 off, no autotuning)."""
    done = False

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done:
            return function(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(*args, **kwargs)
        done = True
        return result

    return run


__all__ = ["uncompiled"]
