"""Something to be done once a module has been imported, if it ever is: torch's compiler takes seconds to import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call `then(module)` now if it is there already, else at the end of its import."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(MetaPathFinder):
    """Finds nothing itself: it lets the others find the module, and steps in when that is loaded."""

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
