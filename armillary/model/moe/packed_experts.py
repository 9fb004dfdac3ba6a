"""Experts whose weights stay packed: each is dequantised when tokens come to it."""

from collections.abc import Sequence

from torch import Tensor, nn

from armillary.model.layers.mlp import activate
from armillary.model.moe.experts import Experts
from armillary.model.quantized.packed_linear import PackedLinear


class PackedExperts(nn.Module):
    """The experts of a layer for `plain_dispatch`, which needs no more than `single`."""

    def __init__(self, experts: Experts, up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.moe, self.activation = experts.moe, experts.activation
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

    def single(self, x_MH: Tensor, expert: int) -> Tensor:
        if not len(x_MH):
            return x_MH
        inner: Tensor = self.up[expert](x_MH)
        return self.down[expert](activate(inner, self.activation, gated=True))  # type: ignore[no-any-return]
