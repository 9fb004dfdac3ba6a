"""RMSNorm and LayerNorm, with or without weight and bias, and Gemma's 1 + w.

Statistics are computed in fp32 for every input dtype.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels.core.dtype import widen
from armillary.spec.model import ModelConfig


class Norm(nn.Module):
    """One norm over the last dim."""

    def __init__(
        self, size: int, *, kind: str, eps: float, weight: bool = True, bias: bool = False, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.size, self.kind, self.eps, self.plus_one = size, kind, eps, plus_one
        self.weight = nn.Parameter(torch.empty(size)) if weight else None
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.chosen: Callable[..., Tensor] | None = None
        self.chosen_add: Callable[..., tuple[Tensor, Tensor]] | None = None

    def reset(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.plus_one else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.chosen is not None:
            return self.chosen(x, self.weight, self.bias, self.eps, self.kind, self.plus_one)
        wide = widen(x)
        weight = None if self.weight is None else widen(self.weight)
        if weight is not None and self.plus_one:
            weight = weight + 1.0
        if self.kind == "rms":
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return (normed if weight is None else normed * weight).to(x.dtype)
        bias = None if self.bias is None else widen(self.bias)
        return F.layer_norm(wide, (self.size,), weight, bias, self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of the sum, the sum), in one kernel where one was chosen and this norm has no hooks."""
        if self.chosen_add is None or self._forward_hooks or self._forward_pre_hooks:
            summed = residual + x
            return self(summed), summed
        return self.chosen_add(x, residual, self.weight, self.bias, self.eps, self.kind, self.plus_one)

    def extra_repr(self) -> str:
        return f"{self.size}, {self.kind}, eps={self.eps}"


def hidden_norm(config: ModelConfig) -> Norm:
    """The norm of a model's residual stream."""
    bias = config.norm == "layer" and config.norm_bias
    return Norm(
        config.hidden,
        kind=config.norm,
        eps=config.norm_eps,
        weight=config.norm_weight,
        bias=bias,
        plus_one=config.norm_plus_one,
    )
