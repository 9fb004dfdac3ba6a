"""Problems that need a GPU: runs of our own trainer and engine, made by `record.py` on an H200, kept as files."""

from __future__ import annotations

from pathlib import Path

from armillary.errors import NotFound
from armillary.spec.gauges import Loop
from armillary.store.home import Home
from tests.planted.problem import ACTION, Problem, Wish

FOLDER = Path(__file__).parent / "recorded"


def _problem(
    name: str, says: str, loop: Loop | None, causes: tuple[str, ...] = (), levers: tuple[str, ...] = ()
) -> Problem:
    """One whose run lies in FOLDER; size and severity are those it was recorded with."""

    def found(wish: Wish, home: Home) -> Path:
        folder = FOLDER / name
        if not folder.is_dir():
            raise NotFound(f"no recorded run {folder}; python -m benchmarks.planted.record makes it on a GPU")
        return folder

    return Problem(name=name, says=says, make=found, loop=loop, causes=causes, levers=levers, recorded=True)


_ALL = (
    _problem("gpu-sync", "a number asked of the device in every block", "inner", ("sync",), (ACTION,)),
    _problem(
        "gpu-short-kernels",
        "blocks not compiled, one row at a time",
        "inner",
        ("launch_overhead",),
        ("train.compile", "layout.micro_batch"),
    ),
    _problem(
        "gpu-full-memory",
        "the device's memory nearly full",
        "training",
        ("memory_pressure",),
        ("layout.recompute", "layout.micro_batch", "layout.offload"),
    ),
    _problem("gpu-no-graphs", "an engine without CUDA graphs", "inner", ("launch_overhead",), ("serve.graphs",)),
    _problem("gpu-healthy", "training on a GPU, well set", None),
    _problem("gpu-graphs", "an engine on a GPU, well set", None),
)
PROBLEMS = tuple(problem for problem in _ALL if (FOLDER / problem.name).is_dir())
MISSING = tuple(problem.name for problem in _ALL if problem not in PROBLEMS)
"""cases that nobody has recorded yet"""
