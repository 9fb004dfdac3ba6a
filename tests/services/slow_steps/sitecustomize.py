"""In PYTHONPATH of a job's ranks: every training step takes half a second longer, on machines of any speed."""

from __future__ import annotations

import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STEP_S = 0.5
TRAINER = "armillary.training.trainer"


class SlowTrainer(Loader):
    """Loads the trainer's module as usual, and then wraps its step."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        step = module.Trainer.step

        def slow_step(*args: Any, **options: Any) -> Any:
            time.sleep(STEP_S)
            return step(*args, **options)

        module.Trainer.step = slow_step


class Finder(MetaPathFinder):
    """Finds the trainer's module only."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == TRAINER else None
        if spec is not None and spec.loader is not None:
            spec.loader = SlowTrainer(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
