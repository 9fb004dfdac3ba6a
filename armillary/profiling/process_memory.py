"""What a process takes before it computes anything: torch, our code and what they bring, as a fresh process has them.

Libraries differ by some hundred megabytes between architectures and builds: much of what a small model takes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from armillary.profiling.settings import Settings
from armillary.store.peaks import Point

MODULES = {"training": "armillary.training.start", "serving": "armillary.serving.engine.llm"}
"""kind of process -> what it imports"""
_TIMEOUT_S = 30.0
_CODE = """
import importlib, sys, torch
importlib.import_module(sys.argv[1])
x = torch.ones(64, 64, requires_grad=True)
(x @ x).sum().backward()
from armillary.machine.process import peak_resident_bytes
print(peak_resident_bytes())
"""


def cases(settings: Settings) -> list[dict[str, Any]]:
    """On a CPU, whose memory is the process's."""
    return [] if settings.on_cuda else [{"what": what} for what in MODULES]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, Point]]:
    """Peak resident bytes of a process that only imports; nothing where it cannot be started."""
    for case in chosen:
        found = resident_bytes(MODULES[case["what"]])
        if found is not None:
            yield "process", {**case, "resident_bytes": found}


def resident_bytes(module: str) -> float | None:
    line = [sys.executable, "-c", _CODE, module]
    try:
        ran = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return float(ran.stdout)
