"""The 2-simplicial attention layer (arXiv 2507.02754): fused projection with two keys and two values per KV head,
optional QK norm and rotary positions, then the `attend` function, then the output.

Rows of the fused weight are grouped per KV head as [q…, k1, k2, v1, v2], so a contiguous shard of the output dim holds
whole heads. Both keys have the same norm and the same rotation.
"""

from torch import Tensor, nn

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.pointwise.rope import rotate
from armillary.model.layers.attention import qk_norms
from armillary.model.layers.attention_forms import Attend
from armillary.model.layers.norm import Norm
from armillary.model.layers.rope import CosSin
from armillary.spec.model import LayerKind, ModelConfig

# B batch, T tokens, N query heads, J = 2 · KV heads, D head dim


class SimplicialAttention(nn.Module):
    """Attention to pairs of tokens, of one layer."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        assert config.simplicial is not None
        self.windows = (config.simplicial.window_1, config.simplicial.window_2)
        self.head_dim, self.group = config.head_dim, config.heads // config.kv_heads
        self.sliding = self.scales_queries = False
        self.rotates = config.positions == "rope" and kind.rope
        self.interleaved, self.scale = config.rope.interleaved, config.scale
        rows = (config.heads + 4 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden, rows, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=config.out_bias)
        self.q_norm, self.k_norm = qk_norms(config, kind)

    def forward(self, x_BTH: Tensor, cos_sin: CosSin | None, attend: Attend, layer: int) -> Tensor:
        angles = None if cos_sin is None or not self.rotates else cos_sin[False]
        q, k, v = self.heads(self.qkv(x_BTH), angles)
        return self.out(attend(layer, q, k, v, self.options()).flatten(2))

    def heads(self, qkv: Tensor, angles: tuple[Tensor, ...] | None, group: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., N, D], keys and values [..., J, D] of the fused projection, normed and rotated; `group` queries
        per KV head where ranks share one."""
        group = group or self.group
        grouped = qkv.unflatten(-1, (-1, group + 4, self.head_dim))
        q, k, v = (part.flatten(-3, -2) for part in grouped.split([group, 2, 2], dim=-2))
        q, k = _normed(q, self.q_norm), _normed(k, self.k_norm)
        if angles is not None:
            q, k = (rotate(x, *angles, interleaved=self.interleaved) for x in (q, k))
        return q, k, v

    def options(self) -> AttentionOptions:
        """What this layer asks of attention; documents are the batch's."""
        return AttentionOptions(scale=self.scale, pair_windows=self.windows)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)
