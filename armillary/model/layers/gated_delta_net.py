"""The gated delta-net layer (Qwen3-Next; arXiv 2412.06464): one recurrent matrix per value head in place of keys and
values.

Rows of the fused projection are grouped per key head as [q, k, v…, z…, b…, a…], so a contiguous shard of the output dim
holds whole heads: z gates the normed output, b gives β, and a, with two weights per value head, the decay.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.dtype import widen
from armillary.kernels.delta.delta_rows import split_inputs
from armillary.kernels.delta.gated_delta import DeltaHeads
from armillary.model.layers.attention_forms import Attend, recurrence
from armillary.model.layers.norm import Norm
from armillary.model.layers.rope import CosSin
from armillary.model.random_values import Part, fill_uniform
from armillary.spec.model import ModelConfig

# B batch, T tokens, H hidden, C channels of the convolution, W its tokens, K key heads, V value heads, E value dim

SMALLEST_RATE, LARGEST_RATE = 0.01, 16.0
"""of the decays of a fresh model's heads (the reference implementation's)"""


class GatedDeltaNet(nn.Module):
    """The sequence mixer of one gated_delta layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        delta = config.gated_delta
        assert delta is not None
        self.sliding = self.rotates = self.scales_queries = False
        self.heads = DeltaHeads(delta.key_dim, delta.value_dim, delta.value_heads // delta.key_heads)
        rows = delta.channels + delta.value_heads * (delta.value_dim + 2)
        self.qkv = nn.Linear(config.hidden, rows, bias=False)
        self.conv_CW = nn.Parameter(torch.empty(delta.channels, delta.conv))
        self.log_rate_V = nn.Parameter(torch.empty(delta.value_heads))
        self.rate_bias_V = nn.Parameter(torch.empty(delta.value_heads))
        self.norm = Norm(delta.value_dim, kind="rms", eps=config.norm_eps)
        self.out = nn.Linear(delta.value_heads * delta.value_dim, config.hidden, bias=False)

    def forward(self, x_BTH: Tensor, cos_sin: CosSin | None, attend: Attend, layer: int) -> Tensor:
        fused = self.qkv(x_BTH)
        qkv_BTC, z_BTVE, decay_BTV, beta_BTV = split_inputs(fused, self.heads, self.log_rate_V, self.rate_bias_V)
        mixed_BTVE = recurrence(attend)(layer, qkv_BTC, decay_BTV, beta_BTV, self.conv_CW, self.heads)
        return self.out(self.gated(mixed_BTVE, z_BTVE).flatten(-2))

    def gated(self, mixed: Tensor, z: Tensor) -> Tensor:
        """norm(mixed) · SiLU(z)."""
        return (widen(self.norm(mixed)) * F.silu(widen(z))).to(mixed.dtype)

    def options(self) -> AttentionOptions:
        """No attention, no options."""
        return AttentionOptions()


def fill_fresh(part: Part, *, seed: int, name: str) -> None:
    """The initial values of a layer's own weights: rates uniform between the two bounds with a bias of 1, and a
    convolution of the usual size for so few inputs."""
    values = part.local
    if name.endswith("rate_bias_V"):
        values.fill_(1.0)
    elif name.endswith("log_rate_V"):
        middle, half = (LARGEST_RATE + SMALLEST_RATE) / 2, (LARGEST_RATE - SMALLEST_RATE) / 2
        fill_uniform(part, seed=seed, name=name, bound=half)
        values.add_(middle).log_()
    else:
        fill_uniform(part, seed=seed, name=name, bound=part.shape[-1] ** -0.5)
