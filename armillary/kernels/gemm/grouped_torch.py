"""Grouped products by torch's own kernel (CUTLASS on Hopper), with gradients made by it too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# P rows (copies of tokens), E experts, K inputs, N outputs


def grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """`armillary.kernels.gemm.grouped.grouped_linear`; rows that belong to nobody are masked, because torch leaves
    them as they were in memory."""
    if full:
        return _Grouped.apply(x_PK, weight_ENK, ends_E)  # type: ignore[no-any-return]
    mine_P1 = torch.arange(len(x_PK), device=x_PK.device)[:, None] < ends_E[-1]
    y_PN: Tensor = _Grouped.apply(x_PK.where(mine_P1, 0.0), weight_ENK, ends_E)
    return y_PN.where(mine_P1, 0.0)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_PK, weight_ENK, ends_E)
        return torch._grouped_mm(x_PK, weight_ENK.transpose(-2, -1), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, dy_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_PK, weight_ENK, ends_E = ctx.saved_tensors
        dy_PN, (x_wanted, weight_wanted, _) = dy_PN.contiguous(), ctx.needs_input_grad
        dx = torch._grouped_mm(dy_PN, weight_ENK, offs=ends_E) if x_wanted else None
        dweight = torch._grouped_mm(dy_PN.t(), x_PK, offs=ends_E) if weight_wanted else None
        return dx, dweight, None
