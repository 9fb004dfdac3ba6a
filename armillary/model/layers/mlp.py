"""The dense MLP: gated (gate and up rows alternate in one weight) or plain.

Alternating rows let a contiguous shard of the output dim hold whole gate/up pairs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from armillary.kernels.pointwise.activation import ACTIVATIONS, CLAMP_ALPHA, CLAMP_LIMIT


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """[..., 2F] with gate and up alternating -> [..., F], or [..., F] -> [..., F] when not gated."""
    if not gated:
        return ACTIVATIONS[activation](x)
    # copies, because element-wise kernels on every other element are several times slower than the copy
    gate, up = (half.contiguous() for half in x.unflatten(-1, (-1, 2)).unbind(-1))
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * gate * torch.sigmoid(CLAMP_ALPHA * gate)
    return ACTIVATIONS[activation](gate) * up


class MLP(nn.Module):
    """up (or gate and up), activation, down."""

    def __init__(self, hidden: int, ffn: int, *, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        self.chosen: Callable[..., Tensor] | None = None
        self.up = nn.Linear(hidden, 2 * ffn if gated else ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x_BTH: Tensor) -> Tensor:
        inner = self.up(x_BTH)
        if self.chosen is not None:
            return self.down(self.chosen(inner, self.activation, self.gated))
        return self.down(activate(inner, self.activation, gated=self.gated))
