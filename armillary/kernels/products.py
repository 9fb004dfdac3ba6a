"""The three products of a linear layer, each by the algorithm that is quickest here when products follow each other.

A chip at its power limit runs slower than in a burst, and not every algorithm by the same share; so candidates are
timed in turn on a chip that is busy all along. Where cuBLASLt is not there, or torch is as quick, torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.cublaslt import Product

# M tokens, N outputs of a linear layer, K inputs

TORCH = "torch"
_HOT_S, _LOOK_S, _STAY_S, _STAYING = 0.6, 0.04, 0.12, 3
_GAIN = 1.005
"""how many times as quick as torch an algorithm must be"""


class Shape(NamedTuple):
    """A product: 'forward' x_MK·w_NKᵀ, 'back' dy_MN·w_NK or 'weight' dy_MNᵀ·x_MK."""

    kind: str
    M: int
    N: int
    K: int

    @property
    def key(self) -> str:
        return f"product {self.kind} {self.M}x{self.N}x{self.K}"


class Products:
    """By torch; rows of x and dy are tokens."""

    adds = False
    """whether adding on the way costs less than a pass of its own"""

    def forward(self, x: Tensor, w_NK: Tensor, add: Tensor | None = None) -> Tensor:
        """x·wᵀ, plus `add` where it is given."""
        made = x @ w_NK.t()
        return made if add is None else add + made

    def back(self, dy: Tensor, w_NK: Tensor) -> Tensor:
        return dy @ w_NK

    def weight(self, dy_MN: Tensor, x_MK: Tensor) -> Tensor:
        return dy_MN.t() @ x_MK


class Tuned(Products):
    """By the algorithms of cuBLASLt that `names` gives; by torch where it gives none, or another shape comes."""

    adds = True

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._made: dict[tuple[Shape, torch.dtype], tuple[Product, int] | None] = {}

    def forward(self, x: Tensor, w_NK: Tensor, add: Tensor | None = None) -> Tensor:
        found = self._found("forward", x, *w_NK.shape)
        if found is None or not _whole(x, w_NK, *(() if add is None else (add,))):
            return super().forward(x, w_NK, add)
        product, place = found
        return product(x, w_NK, place, add).view(*x.shape[:-1], len(w_NK))

    def back(self, dy: Tensor, w_NK: Tensor) -> Tensor:
        found = self._found("back", dy, *w_NK.shape)
        if found is None or not _whole(dy, w_NK):
            return super().back(dy, w_NK)
        product, place = found
        return product(dy, w_NK, place).view(*dy.shape[:-1], w_NK.shape[1])

    def weight(self, dy_MN: Tensor, x_MK: Tensor) -> Tensor:
        found = self._found("weight", dy_MN, dy_MN.shape[1], x_MK.shape[1])
        if found is None or not _whole(dy_MN, x_MK):
            return super().weight(dy_MN, x_MK)
        product, place = found
        return product(dy_MN, x_MK, place)

    def _found(self, kind: str, rows: Tensor, N: int, K: int) -> tuple[Product, int] | None:
        shape = Shape(kind, rows.numel() // rows.shape[-1], N, K)
        at = shape, rows.dtype
        if at not in self._made:
            self._made[at] = self._make(shape, rows.dtype)
        return self._made[at]

    def _make(self, shape: Shape, dtype: torch.dtype) -> tuple[Product, int] | None:
        name = self.names.get(shape.key, TORCH)
        if name == TORCH:
            return None
        product, place = Product(*shape, dtype), int(name.split()[-1])
        return (product, place) if place < len(product.algorithms) else None  # another release of the library


def _whole(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)


# --- choosing


class Linear(NamedTuple):
    """A linear layer whose products are wanted."""

    N: int
    K: int
    added: bool = False
    """whether its output is added to something"""


def tune(layers: Iterable[Linear], M: int, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """For linear layers on M tokens: what to call by each product's key, 'torch' or 'lt PLACE'."""
    names: dict[str, str] = {}
    generator = torch.Generator(device).manual_seed(0)
    for N, K, added in dict.fromkeys(layers):
        sizes = ((M, K), (N, K), (M, N), (M, N) if added else (0, N))
        x, w, dy, sum_to = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
        heat(x, w)
        operands = {"forward": (x, w, sum_to) if added else (x, w), "back": (dy, w), "weight": (dy, x)}
        for kind, given in operands.items():
            shape = Shape(kind, M, N, K)
            names[shape.key] = _quickest(shape, given)
    return names


def heat(x: Tensor, w_NK: Tensor) -> None:
    """Products for about half a second, so that the chip is at its power limit."""
    _seconds(lambda: x @ w_NK.t(), _HOT_S)


def _quickest(shape: Shape, given: tuple[Tensor, ...]) -> str:
    plain = getattr(Products(), shape.kind)
    runs: dict[str, Callable[[], Any]] = {TORCH: lambda: plain(*given)}
    try:
        runs |= _agreeing(Product(*shape, given[0].dtype), plain(*given), given)
    except (OSError, RuntimeError, AttributeError):  # no such library, or one that knows no such product
        return TORCH
    looked = {name: _seconds(run, _LOOK_S) for name, run in runs.items()}
    staying = {TORCH, *sorted(looked, key=lambda name: looked[name])[:_STAYING]}
    spent = dict.fromkeys(staying, 0.0)
    for _ in range(2):  # in turn, since the chip's temperature drifts
        for name in staying:
            spent[name] += _seconds(runs[name], _STAY_S)
    best = min(spent, key=lambda name: spent[name])
    return best if spent[TORCH] > _GAIN * spent[best] else TORCH


def _agreeing(product: Product, expected: Tensor, given: tuple[Tensor, ...]) -> dict[str, Callable[[], Any]]:
    """The algorithms whose result is torch's up to the order of sums."""
    found: dict[str, Callable[[], Any]] = {}
    first, second, *added = given
    for place in range(len(product.algorithms)):
        made = product(first, second, place, *added)
        if float((made - expected).float().norm() / expected.float().norm()) < 1e-2:
            found[f"lt {place}"] = partial(product, first, second, place, *added)
    return found


def _seconds(run: Callable[[], Any], about_s: float) -> float:
    """Of one call, from as many as take about that long."""
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    for _ in range(2):
        run()
    middle.record()
    middle.synchronize()
    count = max(2, int(about_s * 2e3 / max(1e-3, begin.elapsed_time(middle))))
    middle.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return middle.elapsed_time(end) / 1e3 / count
