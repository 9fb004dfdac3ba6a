"""The fastest GEMM algorithm per shape, for GEMMs that follow each other: candidates timed alternately on a hot GPU.

A GPU at its power limit runs slower than in a burst, and not every algorithm by the same factor; so each is timed for
tenths of a second while the GPU stays busy. Candidates are cuBLASLt's algorithms and, on Hopper, our persistent GEMM;
where none is faster than torch, torch is used.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.requirements import lacking, note_once
from armillary.kernels.core.version_trial import first_line
from armillary.kernels.gemm.cublaslt import CublasLtGemm
from armillary.kernels.gemm.gemm import (
    LIBRARY,
    PERSISTENT,
    SEPARATE,
    TORCH,
    Gemms,
    GemmShape,
    TunedGemms,
    add_,
    persistent,
    with_algorithm,
)

# M tokens, N outputs of a linear layer, K inputs

_WARM_UP_S, _FIRST_ROUND_S, _FINAL_ROUND_S = 0.3, 0.025, 0.15
# candidates whose variants are tried, candidates in the final, and rounds of the final
_VARIED, _FINALISTS, _ROUNDS = 1, 2, 2
_TOLERANCE = 1e-2  # relative to torch's result
_GAIN = 1.005  # speed-up over torch that an algorithm must reach
Runs = dict[str, Callable[[], Any]]


class LinearShape(NamedTuple):
    """A linear layer whose GEMMs are tuned."""

    N: int
    K: int
    added: bool = False  # whether its output is added to a residual


def tune(layers: Iterable[LinearShape], M: int, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """For linear layers on M tokens: GEMM key -> 'torch', 'lt ALGORITHM' or 'persistent TILES'."""
    names: dict[str, str] = {}
    for N, K, added in dict.fromkeys(layers):
        x, w, dy, addend = _random(dtype, device, (M, K), (N, K), (M, N), (M, N) if added else (0, N))
        operands = {"forward": (x, w, addend) if added else (x, w), "back": (dy, w), "weight": (dy, x)}
        for kind, arguments in operands.items():
            shape = GemmShape(kind, M, N, K)
            names[shape.key] = _tune_gemm(shape, arguments)
    return names


def tune_sums(
    layers: Iterable[LinearShape], M: int, dtype: torch.dtype, device: torch.device, names: Mapping[str, str]
) -> dict[str, str]:
    """The same for weight gradients that are accumulated over micro-batches, with 'apart' among the candidates;
    `names` has the algorithms of a gradient by itself."""
    shapes = (GemmShape("sum", M, N, K) for N, K in dict.fromkeys((layer.N, layer.K) for layer in layers))
    return {shape.key: _tune_sum(shape, dtype, device, names) for shape in shapes}


def _random(dtype: torch.dtype, device: torch.device, *sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes]


def fastest(runs: Runs, variants: Callable[[str], Runs] = lambda name: {}) -> str:
    """The name of the fastest run; torch's where none is clearly faster. `variants` gives those of a candidate; they
    are tried for the most promising."""
    seconds(runs[TORCH], _WARM_UP_S)
    first_s = _first_round(runs)
    for name in _ranking(first_s)[:_VARIED]:
        more = variants(name)
        runs |= more
        first_s |= _first_round(more)
    finalists = [TORCH, *_ranking(first_s)[:_FINALISTS]]
    final_s = dict.fromkeys(finalists, 0.0)
    for number in range(_ROUNDS):
        for name in finalists if number % 2 == 0 else reversed(finalists):
            final_s[name] += seconds(runs[name], _FINAL_ROUND_S)
    best = min(final_s, key=lambda name: final_s[name])
    return best if final_s[TORCH] > _GAIN * final_s[best] else TORCH


def _first_round(runs: Runs) -> dict[str, float]:
    taken = dict.fromkeys(runs, 0.0)
    for name in (*runs, *reversed(runs)):  # forth and back: the first ones find a cooler GPU
        taken[name] += seconds(runs[name], _FIRST_ROUND_S)
    return taken


def _ranking(taken: dict[str, float]) -> list[str]:
    return [name for name in sorted(taken, key=lambda name: taken[name]) if name != TORCH]


def _tune_gemm(shape: GemmShape, arguments: tuple[Tensor, ...]) -> str:
    plain = getattr(Gemms(), shape.kind)
    expected = plain(*arguments)
    candidates = CublasLtCandidates(shape, expected, arguments)
    runs = {TORCH: lambda: plain(*arguments), **candidates.proposals(), **own_candidates(shape, expected, arguments)}
    return fastest(runs, candidates.variants)


def own_candidates(shape: GemmShape, expected: Tensor, arguments: tuple[Tensor, ...]) -> Runs:
    """Our persistent GEMM, with each choice of tiles whose result equals torch's up to the order of sums."""
    runs: Runs = {}
    for tiles in own_tiles(arguments[0].device, added=len(arguments) > 2):
        name = f"{PERSISTENT}{tiles}"
        run = persistent(name, shape, arguments[0])
        if run is None:
            continue
        try:
            agrees = _agrees(run(*arguments), expected)
        except Exception as error:  # a compiler may fail in its own way on another release; cuBLAS remains
            note_once(f"the GEMM {name} is not tried for {shape.key}: {first_line(error)[:200]}")
            continue
        if agrees:
            runs[name] = partial(run, *arguments)
        else:
            note_once(f"the GEMM {name} is not used for {shape.key}: it disagrees with torch")
    return runs


def own_tiles(device: torch.device, *, added: bool) -> list[str]:
    """Names of tiles that are tried: one where something is added, whose tiles leave less space in shared memory."""
    if lacking(("triton", "wgmma"), device.type):
        return []
    from armillary.kernels.gemm.large_linear_wgmma import TILES

    return list(TILES)[:1] if added else list(TILES)


def _agrees(result: Tensor, expected: Tensor) -> bool:
    return float((result - expected).float().norm() / expected.float().norm()) < _TOLERANCE


def _tune_sum(shape: GemmShape, dtype: torch.dtype, device: torch.device, names: Mapping[str, str]) -> str:
    """Accumulated inside the GEMM or by a kernel after it, both as from the second micro-batch on."""
    x, dy = _random(dtype, device, (shape.M, shape.K), (shape.M, shape.N))
    total, plain, tuned = dy.new_zeros((shape.N, shape.K), dtype=torch.float32), Gemms(), TunedGemms(names)
    runs: Runs = {TORCH: lambda: plain.sum(total, dy, x, first=False)}
    if dy.is_cuda:
        runs[SEPARATE] = lambda: add_(total, tuned.weight(dy, x), first=False)
    candidates = CublasLtCandidates(shape, plain.weight(dy, x).float(), (dy, x), total)
    return fastest(runs | candidates.proposals(), candidates.variants)


class CublasLtCandidates:
    """The cuBLASLt algorithms for a GEMM whose result equals torch's up to the order of sums."""

    def __init__(
        self, shape: GemmShape, expected: Tensor, arguments: tuple[Tensor, ...], total: Tensor | None = None
    ) -> None:
        """`total`: the tensor that the result is added to, in place."""
        self.expected, self.arguments, self.total = expected, arguments, total
        self.gemm: CublasLtGemm | None = None
        try:
            self.gemm = CublasLtGemm(*shape, arguments[0].dtype)
        except (OSError, RuntimeError, AttributeError) as error:  # no such library, or it has no such GEMM
            if arguments[0].is_cuda:
                note_once(f"cuBLASLt is not tried beside torch's GEMMs: {error}")

    def proposals(self) -> Runs:
        return self._agreeing(map(str, range(len(self.gemm.proposed)))) if self.gemm else {}

    def variants(self, name: str) -> Runs:
        if self.gemm is None or not name.startswith(LIBRARY):
            return {}
        return self._agreeing(self.gemm.variants(name.removeprefix(LIBRARY)))

    def _agreeing(self, names: Iterable[str]) -> Runs:
        runs: Runs = {}
        for name in names:
            with suppress(RuntimeError, AttributeError):  # proposed, and then refused
                run = self._run(name)
                if run is not None:
                    runs[f"{LIBRARY}{name}"] = run
        return runs

    def _run(self, name: str) -> Callable[[], Any] | None:
        assert self.gemm is not None
        run = with_algorithm(self.gemm, name)
        if run is None:
            return None
        if not _agrees(run(*self.arguments), self.expected):
            return None
        return partial(run, *self.arguments, *(() if self.total is None else (self.total, self.total)))


def seconds(run: Callable[[], Any], about_s: float) -> float:
    """Seconds per call, from as many calls as take about `about_s`, after a few for warm-up."""
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    for _ in range(2):
        run()
    middle.record()
    middle.synchronize()
    count = max(2, int(about_s * 2e3 / max(1e-3, begin.elapsed_time(middle))))
    for _ in range(count // 4):
        run()
    middle.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return middle.elapsed_time(end) / 1e3 / count
