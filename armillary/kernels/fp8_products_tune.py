"""Which of cuBLASLt's algorithms multiplies fp8 quickest here when products follow each other on a hot chip.

Where the library proposes one algorithm only, as for operands with a scale a row, there is nothing to time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from armillary.kernels.cublaslt import Fp8Product
from armillary.kernels.fp8_linear import E4M3, E5M2
from armillary.kernels.fp8_operands import Operand, Scaled, Source, make_operand
from armillary.kernels.fp8_products import key
from armillary.kernels.note import note_once
from armillary.kernels.products_tune import Linear, seconds

# M tokens, N outputs of a linear layer, K inputs

_HOT_S, _LOOK_S, _MOST = 0.3, 0.03, 8
"""seconds of heating, of one look at a candidate, and how many there are at most"""
_GAIN = 1.01
"""how many times as quick as the library's first choice an algorithm must be"""


def tune_fp8(
    layers: Iterable[Linear], M: int, scaling: str, device: torch.device, *, summed: bool
) -> dict[str, str]:
    """For linear layers on M tokens: product -> number of the algorithm. `summed`: weights' gradients are added up in
    fp32."""
    names: dict[str, str] = {}
    for N, K in dict.fromkeys((layer.N, layer.K) for layer in layers):
        x, dy = _drawn(M, K, E4M3, scaling, device), _drawn(M, N, E5M2, scaling, device)
        w = _drawn(N, K, E4M3, "row" if scaling == "token" else scaling, device)
        out = torch.float32 if summed else torch.bfloat16
        wanted = (
            (x.rows, w.rows, torch.bfloat16, True), (dy.rows, w.turned, torch.bfloat16, False),
            (dy.turned, x.turned, out, False),
        )  # fmt: skip
        for a, b, dtype, fast in wanted:
            assert a is not None and b is not None
            shape = len(a.values), len(b.values), a.values.shape[1]
            names[key(*shape, dtype, a.scale.dim() == 2)] = _quickest(shape, a, b, dtype, fast=fast)
    return names


def _drawn(rows: int, columns: int, dtype: torch.dtype, scaling: str, device: torch.device) -> Operand:
    generator = torch.Generator(device).manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator, device=device).to(torch.bfloat16)
    return make_operand(Source(x=x), dtype, scaling)


def _quickest(shape: tuple[int, int, int], a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> str:
    how = {"a": a.values.dtype, "b": b.values.dtype, "out": dtype, "by_row": a.scale.dim() == 2, "fast": fast}
    try:
        product = Fp8Product(*shape, **how)  # type: ignore[arg-type]
    except (OSError, RuntimeError, AttributeError) as error:
        note_once(f"cuBLASLt's fp8 products are not timed: {error}")
        return "0"
    runs = {str(i): partial(product.scaled, a, b, product.proposed[i]) for i in range(len(product.proposed[:_MOST]))}
    if len(runs) < 2:
        return "0"
    seconds(runs["0"], _HOT_S)
    spent = dict.fromkeys(runs, 0.0)
    for name in (*runs, *reversed(runs)):  # there and back: the first ones find the chip cooler
        spent[name] += seconds(runs[name], _LOOK_S)
    best = min(spent, key=lambda name: spent[name])
    return best if spent["0"] > _GAIN * spent[best] else "0"
