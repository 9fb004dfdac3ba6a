"""CUDA graphs of steps: one per padded shape, all with the same input buffer and memory pool.

On a device without graphs the same function is called as it is.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from armillary.engine.runner.batch_encoder import Fit, unpadded
from armillary.engine.runner.step_input import Shape

_log = logging.getLogger(__name__)
_RESERVE_BYTES = 2 << 30
"""free memory below which the allocator's cache is released before a capture"""

Compute = Callable[[Shape, bool, Tensor], Any]  # (shape, whether the fast sampler is used, packed inputs) -> tensors


class Steps:
    """Runs `compute` eagerly."""

    fit: Fit = staticmethod(unpadded)
    captures_later = True
    """whether shapes that were not captured at the start are when they come a second time"""

    def __init__(self, compute: Compute, send: Callable[[Any], Tensor]) -> None:
        self._compute, self._send = compute, send

    def run(self, shape: Shape, quick: bool, ints: Any) -> Any:
        return self._compute(shape, quick, self._send(ints))

    def warm(self, groups: int) -> int:
        """Number of captured graphs."""
        return 0

    def trial(self, groups: int) -> int:
        """Bytes that graphs will take."""
        return 0


class GraphSteps(Steps):
    """Runs `compute` as CUDA graphs, captured by `warm` or when a shape comes a second time."""

    def __init__(
        self,
        compute: Compute,
        send: Callable[[Any], Tensor],
        *,
        max_running: int,
        max_tokens: int,
        drafts: bool,
        adapters: bool = False,
        device: torch.device,
        null: Callable[[Shape], Any],
    ) -> None:
        super().__init__(compute, send)
        self.rows = row_sizes(max_running)
        self.tokens = token_sizes(max(max_tokens, max_running))
        self._drafts = drafts  # steps with draft tokens are captured as well
        self._adapters = adapters  # and steps with LoRA adapters
        self._null, self._device = null, device
        self._static: Tensor | None = None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._seen: set[Hashable] = set()
        self._full = False  # there is no memory for another graph
        self._aside = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self.fit = self._fit

    def _fit(self, tokens: int, rows: int, decodes: bool) -> tuple[int, int]:
        if decodes:
            size = next(size for size in self.rows if size >= rows)
            return size, size
        return next(size for size in self.tokens if size >= tokens), self.rows[-1]

    def run(self, shape: Shape, quick: bool, ints: Any) -> Any:
        """The graph of this shape; its results are overwritten by the next step."""
        key = (shape, quick)
        is_known = key in self._seen and self.captures_later
        if key not in self._graphs and not (is_known and self._captured(shape, quick)):
            self._seen.add(key)
            return self._compute(shape, quick, self._load(shape, ints))
        self._load(shape, ints)
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def warm(self, groups: int) -> int:
        """Capture every padded shape, the largest first, so that the others fit into its memory."""
        shapes = self._shapes(groups)
        for shape in shapes:
            if (shape, True) not in self._graphs and not self._captured(shape, True):
                missing = len(shapes) - len(self._graphs)
                _log.warning(
                    "no memory for %d of %d CUDA graphs: steps of those sizes are slower; lower serve.memory_fraction",
                    missing,
                    len(shapes),
                )
                break
        torch.cuda.synchronize(self._device)
        return len(self._graphs)

    def _shapes(self, groups: int) -> list[Shape]:
        kinds = (False, True) if self._drafts else (False,)
        decodes = [Shape(rows, rows, groups, True, drafts) for drafts in kinds for rows in reversed(self.rows)]
        shapes = [Shape(tokens, self.rows[-1], groups, False) for tokens in reversed(self.tokens)] + decodes
        return shapes + [replace(shape, adapters=True) for shape in shapes if self._adapters]

    def trial(self, groups: int) -> int:
        """Bytes that graphs will take: the pool of the largest, twice, since the tensors of other shapes leave gaps in
        it; what the first decode adds (its kernels are loaded); what each further graph adds, the median of a few. All
        are freed, since they were captured over buffers that are about to change."""
        shapes, free = self._shapes(groups), [self._free()]
        further = range(len(shapes) - 2, 0, -max(1, len(shapes) // 4))
        for at in (0, len(shapes) - 1, *further):
            self._captured(shapes[at], True)
            free.append(self._free())
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._free()
        largest, decode, *rest = (max(0, before - after) for before, after in pairwise(free))
        return 2 * largest + decode + int(median(rest or [0])) * (len(shapes) - 2)

    def _free(self) -> int:
        """Free device memory, after the allocator has released its cache."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _load(self, shape: Shape, ints: Any) -> Tensor:
        if self._static is None:
            largest = Shape(self.tokens[-1], self.rows[-1], shape.groups, False).size
            self._static = torch.zeros(largest, dtype=torch.int32, device=self._device)
        packed = self._static[: shape.size]
        packed.copy_(torch.from_numpy(ints).pin_memory(), non_blocking=True)
        return packed

    def _captured(self, shape: Shape, quick: bool) -> bool:
        """Capture a shape; without memory for it, no more graphs are captured and steps run eagerly."""
        if self._full:
            return False
        if torch.cuda.mem_get_info(self._device)[0] < _RESERVE_BYTES:
            torch.cuda.empty_cache()  # a capture cannot: what eager runs have left would be missing
        try:
            self._capture(shape, quick)
        except RuntimeError as error:
            if not is_out_of_memory(error) and not (error.__context__ and is_out_of_memory(error.__context__)):
                raise
            self._full = True
        if self._full:
            torch.cuda.empty_cache()
        return not self._full

    def _capture(self, shape: Shape, quick: bool) -> None:
        """Capture on a step of padding, which writes nothing, after one eager run for what compiles or allocates first.
        torch's own context manager frees all cached memory before each graph, which costs more than a graph."""
        packed, current = self._load(shape, self._null(shape)), torch.cuda.current_stream(self._device)
        self._aside.wait_stream(current)
        try:
            with torch.cuda.stream(self._aside):
                self._compute(shape, quick, packed)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    results = self._compute(shape, quick, packed)
                finally:
                    graph.capture_end()
        finally:
            current.wait_stream(self._aside)
        self._graphs[(shape, quick)] = (graph, results)


def row_sizes(most: int) -> list[int]:
    """Batches that decodes are padded to. GEMMs of up to 16 rows cost the same, those of many mostly what padding
    they have, but cuBLAS is faster at 256 rows than at 224 and 240 (an H200, 8B, 220 decodes: 13.1, 13.4 and 13.2 ms);
    the cost of attention does not depend on padding at all."""
    sizes = [1, 2, 4, 8, 16, 32, 48, *range(64, 224, 16), *range(256, most + 32, 32)]
    return sorted({min(size, most) for size in [*sizes, most]})


def token_sizes(most: int) -> list[int]:
    """Token counts that mixed steps are padded to: GEMMs pay for their padding, so it is kept small; 224
    and 288 tokens took an H200 as long as 256 and 320."""
    sizes, size = [64, 96, 128, 160, *range(192, 512, 64)], 512
    while size < most:
        sizes += [size * quarters // 4 for quarters in (4, 5, 6, 7)]
        size *= 2
    return sorted({min(size, most) for size in [*sizes, most]})


_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "alloc_failed",
    "could not create a memory",
    "failed to allocate",
)
"""in errors of torch's CPU allocator (Linux, Windows), CUDA's runtime and drivers, C++, cuBLAS and oneDNN"""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def first_line(error: BaseException) -> str:
    """First line of an error, without advice and C++ frames."""
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return message.split(". ")[0][:160]
