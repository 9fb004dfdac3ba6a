"""Which algorithm multiplies quickest here when products follow each other: candidates timed in turn on a hot chip.

A chip at its power limit runs slower than in a burst, and not every algorithm by the same share; so each is timed for
tenths of a second while the chip stays busy. Where cuBLASLt is not there, or torch is as quick, torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.requirements import note_once
from armillary.kernels.gemm.cublaslt import CublasLtGemm
from armillary.kernels.gemm.gemm import APART, LIBRARY, TORCH, Gemms, GemmShape, TunedGemms, add_, ready

# M tokens, N outputs of a linear layer, K inputs

_HOT_S, _LOOK_S, _STAY_S = 0.3, 0.025, 0.15
"""seconds of heating, of a first look at each candidate, of a second one at those that stay"""
_VARIED, _STAYING, _TURNS = 1, 2, 2
"""candidates whose variants are tried, those that are looked at again, and how often"""
_GAIN = 1.005
"""how many times as quick as torch an algorithm must be"""
Runs = dict[str, Callable[[], Any]]


class LinearShape(NamedTuple):
    """A linear layer whose products are wanted."""

    N: int
    K: int
    added: bool = False
    """whether its output is added to something"""


def tune(layers: Iterable[LinearShape], M: int, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """For linear layers on M tokens: what to call by each product's key, 'torch' or 'lt ALGORITHM'."""
    names: dict[str, str] = {}
    for N, K, added in dict.fromkeys(layers):
        x, w, dy, sum_to = _drawn(dtype, device, (M, K), (N, K), (M, N), (M, N) if added else (0, N))
        operands = {"forward": (x, w, sum_to) if added else (x, w), "back": (dy, w), "weight": (dy, x)}
        for kind, given in operands.items():
            shape = GemmShape(kind, M, N, K)
            names[shape.key] = _chosen(shape, given)
    return names


def tune_sums(
    layers: Iterable[LinearShape], M: int, dtype: torch.dtype, device: torch.device, names: Mapping[str, str]
) -> dict[str, str]:
    """The same for weights' gradients that are summed over micro-batches, 'apart' among the candidates: `names` says
    how a gradient by itself is made."""
    found: dict[str, str] = {}
    for N, K in dict.fromkeys((layer.N, layer.K) for layer in layers):
        x, dy = _drawn(dtype, device, (M, K), (M, N))
        shape = GemmShape("sum", M, N, K)
        found[shape.key] = _chosen_sum(shape, dy, x, names)
    return found


def _drawn(dtype: torch.dtype, device: torch.device, *sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes]


def quickest(runs: Runs, more: Callable[[str], Runs] = lambda name: {}) -> str:
    """The name of the quickest; torch's where none is clearly quicker. `more` gives the variants of a candidate, tried
    for the most promising."""
    seconds(runs[TORCH], _HOT_S)
    looked = _looked(runs)
    for name in _order(looked)[:_VARIED]:
        runs |= (found := more(name))
        looked |= _looked(found)
    staying = [TORCH, *_order(looked)[:_STAYING]]
    spent = dict.fromkeys(staying, 0.0)
    for turn in range(_TURNS):
        for name in staying if turn % 2 == 0 else reversed(staying):
            spent[name] += seconds(runs[name], _STAY_S)
    best = min(spent, key=lambda name: spent[name])
    return best if spent[TORCH] > _GAIN * spent[best] else TORCH


def _looked(runs: Runs) -> dict[str, float]:
    looked = dict.fromkeys(runs, 0.0)
    for name in (*runs, *reversed(runs)):  # there and back: the first ones find the chip cooler
        looked[name] += seconds(runs[name], _LOOK_S)
    return looked


def _order(looked: dict[str, float]) -> list[str]:
    return [name for name in sorted(looked, key=lambda name: looked[name]) if name != TORCH]


def _chosen(shape: GemmShape, given: tuple[Tensor, ...]) -> str:
    plain = getattr(Gemms(), shape.kind)
    found = CublasLtCandidates(shape, plain(*given), given)
    return quickest({TORCH: lambda: plain(*given), **found.proposals()}, found.variants)


def _chosen_sum(shape: GemmShape, dy: Tensor, x: Tensor, names: Mapping[str, str]) -> str:
    """By the product itself, or after it; both as they run from the second micro-batch on."""
    total, plain, chosen = dy.new_zeros((shape.N, shape.K), dtype=torch.float32), Gemms(), TunedGemms(names)
    runs: Runs = {TORCH: lambda: plain.sum(total, dy, x, first=False)}
    if dy.is_cuda:
        runs[APART] = lambda: add_(total, chosen.weight(dy, x), first=False)
    found = CublasLtCandidates(shape, plain.weight(dy, x).float(), (dy, x), total)
    return quickest(runs | found.proposals(), found.variants)


class CublasLtCandidates:
    """What cuBLASLt has for a product: the algorithms whose result is torch's up to the order of sums."""

    def __init__(
        self, shape: GemmShape, expected: Tensor, given: tuple[Tensor, ...], total: Tensor | None = None
    ) -> None:
        """`total`: what the result is added to, in place."""
        self.expected, self.given, self.total = expected, given, total
        self.product: CublasLtGemm | None = None
        try:
            self.product = CublasLtGemm(*shape, given[0].dtype)
        except (OSError, RuntimeError, AttributeError) as error:  # no such library, or one that knows no such product
            if given[0].is_cuda:
                note_once(f"cuBLASLt is not tried beside torch's products: {error}")

    def proposals(self) -> Runs:
        return self._agreeing(map(str, range(len(self.product.proposed)))) if self.product else {}

    def variants(self, name: str) -> Runs:
        if self.product is None or not name.startswith(LIBRARY):
            return {}
        return self._agreeing(self.product.variants(name.removeprefix(LIBRARY)))

    def _agreeing(self, names: Iterable[str]) -> Runs:
        found: Runs = {}
        for name in names:
            with suppress(RuntimeError, AttributeError):  # proposed, and then refused
                run = self._run(name)
                if run is not None:
                    found[f"{LIBRARY}{name}"] = run
        return found

    def _run(self, name: str) -> Callable[[], Any] | None:
        assert self.product is not None
        run = ready(self.product, name)
        if run is None:
            return None
        off = (run(*self.given) - self.expected).float().norm() / self.expected.float().norm()
        if not float(off) < 1e-2:
            return None
        if self.total is None:
            return partial(run, *self.given)
        return partial(run, *self.given, self.total, self.total)


def seconds(run: Callable[[], Any], about_s: float) -> float:
    """Of one call, from as many as take about that long, after a few of its own."""
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
