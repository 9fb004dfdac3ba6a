"""Which algorithm multiplies quickest here when products follow each other: candidates timed in turn on a hot chip.

A chip at its power limit runs slower than in a burst, and not every algorithm by the same share; so each is timed for
tenths of a second while the chip stays busy. Where cuBLASLt is not there, or torch is as quick, torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.cublaslt import Product
from armillary.kernels.products import APART, TORCH, Products, Shape, Tuned, add_

# M tokens, N outputs of a linear layer, K inputs

_HOT_S, _LOOK_S, _STAY_S, _STAYING, _TURNS = 0.6, 0.05, 0.15, 3, 2
"""seconds of heating, of a first look at each candidate, of a second one at those that stay; how many do, how often"""
_GAIN = 1.005
"""how many times as quick as torch an algorithm must be"""
Runs = dict[str, Callable[[], Any]]


class Linear(NamedTuple):
    """A linear layer whose products are wanted."""

    N: int
    K: int
    added: bool = False
    """whether its output is added to something"""


def tune(
    layers: Iterable[Linear], M: int, dtype: torch.dtype, device: torch.device, *, summed: bool = False
) -> dict[str, str]:
    """For linear layers on M tokens: what to call by each product's key, 'torch', 'apart' or 'lt PLACE'. `summed`:
    weights' gradients are summed over micro-batches."""
    names: dict[str, str] = {}
    generator = torch.Generator(device).manual_seed(0)
    for N, K, added in dict.fromkeys(layers):
        sizes = ((M, K), (N, K), (M, N), (M, N) if added else (0, N))
        x, w, dy, sum_to = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
        heat(x, w)
        operands = {"forward": (x, w, sum_to) if added else (x, w), "back": (dy, w), "weight": (dy, x)}
        for kind, given in operands.items():
            shape = Shape(kind, M, N, K)
            names[shape.key] = quickest(_candidates(shape, given))
        if summed:
            names |= _sum_names(Shape("sum", M, N, K), dy, x, names)
    return names


def heat(x: Tensor, w_NK: Tensor) -> None:
    """Products for about half a second, so that the chip is at its power limit."""
    seconds(lambda: x @ w_NK.t(), _HOT_S)


def quickest(runs: Runs) -> str:
    """The name of the quickest; torch's where none is clearly quicker."""
    looked = {name: seconds(run, _LOOK_S) for name, run in runs.items()}
    staying = [TORCH, *[name for name in sorted(looked, key=lambda name: looked[name]) if name != TORCH][:_STAYING]]
    spent = dict.fromkeys(staying, 0.0)
    for turn in range(_TURNS):  # in turn and back again, since the chip's temperature drifts
        for name in staying if turn % 2 == 0 else reversed(staying):
            spent[name] += seconds(runs[name], _STAY_S)
    best = min(spent, key=lambda name: spent[name])
    return best if spent[TORCH] > _GAIN * spent[best] else TORCH


def _candidates(shape: Shape, given: tuple[Tensor, ...]) -> Runs:
    plain = getattr(Products(), shape.kind)
    runs: Runs = {TORCH: lambda: plain(*given)}
    try:
        return runs | _agreeing(Product(*shape, given[0].dtype), plain(*given), given)
    except (OSError, RuntimeError, AttributeError):  # no such library, or one that knows no such product
        return runs


def _sum_names(shape: Shape, dy: Tensor, x: Tensor, names: dict[str, str]) -> dict[str, str]:
    """By the product itself, or after it; both as they run from the second micro-batch on."""
    total, plain, chosen = dy.new_zeros((shape.N, shape.K), dtype=torch.float32), Products(), Tuned(names)
    runs: Runs = {TORCH: lambda: plain.sum(total, dy, x, first=False)}
    if dy.is_cuda:
        runs[APART] = lambda: add_(total, chosen.weight(dy, x), first=False)
    try:
        product = Product(*shape, dy.dtype)
        found = _agreeing(product, plain.weight(dy, x).float(), (dy, x))
        runs |= {name: partial(product, dy, x, int(name.split()[-1]), total, total) for name in found}
    except (OSError, RuntimeError, AttributeError):
        pass  # as above
    return {shape.key: quickest(runs)}


def _agreeing(product: Product, expected: Tensor, given: tuple[Tensor, ...]) -> Runs:
    """The algorithms whose result is torch's up to the order of sums."""
    found: Runs = {}
    first, second, *added = given
    for place in range(len(product.algorithms)):
        made = product(first, second, place, *added)
        if float((made - expected).float().norm() / expected.float().norm()) < 1e-2:
            found[f"lt {place}"] = partial(product, first, second, place, *added)
    return found


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
