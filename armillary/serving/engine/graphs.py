"""CUDA graphs of whole steps: one for each padded shape, all over the same input buffer and pool of memory.

On a device without graphs the same function is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from armillary.serving.engine.encode import Fit, exactly
from armillary.serving.engine.step import Shape

Compute = Callable[[Shape, bool, Tensor], Any]
"""(shape, whether tokens are drawn the quick way, packed inputs) -> tensors"""
_FEW_ROWS = 32


class Steps:
    """Runs `compute` eagerly, a step at a time."""

    fit: Fit = staticmethod(exactly)

    def __init__(self, compute: Compute, send: Callable[[Any], Tensor]) -> None:
        self._compute, self._send = compute, send

    def run(self, shape: Shape, quick: bool, ints: Any) -> Any:
        return self._compute(shape, quick, self._send(ints))

    eager = run

    def warm(self, groups: int) -> int:
        """Graphs captured."""
        return 0


class GraphSteps(Steps):
    """Runs `compute` as graphs, captured when `warm` is called or when a shape first comes."""

    def __init__(
        self, compute: Compute, send: Callable[[Any], Tensor], *, max_running: int, max_tokens: int,
        device: torch.device, null: Callable[[Shape], Any],
    ) -> None:  # fmt: skip
        super().__init__(compute, send)
        self.rows = row_sizes(max_running)
        self.tokens = token_sizes(max(max_tokens, max_running))
        self._null, self._device = null, device
        self._static: Tensor | None = None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None
        self.fit = self._fit

    def _fit(self, tokens: int, rows: int, decodes: bool) -> tuple[int, int]:
        if decodes:
            size = next(size for size in self.rows if size >= rows)
            return size, size
        wide = min(_FEW_ROWS, self.rows[-1]) if rows <= _FEW_ROWS else self.rows[-1]
        return next(size for size in self.tokens if size >= tokens), wide

    def run(self, shape: Shape, quick: bool, ints: Any) -> Any:
        """The graph of this shape; its results are overwritten by the next step."""
        key = (shape, quick)
        if key not in self._graphs:
            self._capture(shape, quick)
        self._load(shape, ints)
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def warm(self, groups: int) -> int:
        """Capture every shape that steps are padded to, the largest first, so that the others fit its memory."""
        shapes = [Shape(tokens, rows, groups, False) for tokens in reversed(self.tokens)
                  for rows in sorted({self.rows[-1], min(_FEW_ROWS, self.rows[-1])}, reverse=True)]  # fmt: skip
        shapes += [Shape(rows, rows, groups, True) for rows in reversed(self.rows)]
        for shape in shapes:
            if (shape, True) not in self._graphs:
                self._capture(shape, True)
        torch.cuda.synchronize(self._device)
        return len(self._graphs)

    def _load(self, shape: Shape, ints: Any) -> Tensor:
        if self._static is None:
            largest = Shape(self.tokens[-1], self.rows[-1], shape.groups, False).size
            self._static = torch.zeros(largest, dtype=torch.int32, device=self._device)
        packed = self._static[: shape.size]
        packed.copy_(torch.from_numpy(ints).pin_memory(), non_blocking=True)
        return packed

    def _capture(self, shape: Shape, quick: bool) -> None:
        """On a step of padding alone, which writes nothing; once outside, for what compiles or allocates at first."""
        packed = self._load(shape, self._null(shape))
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            self._compute(shape, quick, packed)
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            results = self._compute(shape, quick, packed)
        self._graphs[(shape, quick)] = (graph, results)


def row_sizes(most: int) -> list[int]:
    """Batches that decodes are padded to: close together where a row is a large part of the step."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return sorted({min(size, most) for size in sizes})


def token_sizes(most: int) -> list[int]:
    """Token counts that mixed steps are padded to: no more than a third is padding."""
    sizes, size = [], 64
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return sorted({min(size, most) for size in [*sizes, most]})
