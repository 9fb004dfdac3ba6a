"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are up-projections of one small latent,
beside a rotary key that all heads share.

Expanded, for training and full prompts, every head has its own keys and values. Absorbed, for caches, queries are
multiplied by the keys' up-projection instead, so that latents are the keys and, but for the rotary dims, the values:
a token takes kv_rank + rope_dim numbers. Both are the same function.
"""

import torch
from torch import Tensor, nn

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.pointwise.rope import rotate
from armillary.model.layers.attention_forms import Attend, OverLatents
from armillary.model.layers.norm import Norm
from armillary.model.layers.rope import CosSin
from armillary.spec.model import ModelConfig

# B batch, T tokens, H hidden, N heads, P head dim without positions, R rotary dims, V head dim of values, C latent rank

LATENT_NORM_EPS = 1e-6
"""of the norms of latents, whatever the model's own is (DeepSeek's code and transformers' leave it at its default)"""


class LatentAttention(nn.Module):
    """The attention of one layer of a model with `config.mla`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None
        self.mla, self.scale, self.interleaved = mla, config.scale, config.rope.interleaved
        self.rotates, self.sliding, self.scales_queries = True, False, False
        query_rows = config.heads * (mla.nope_dim + mla.rope_dim)
        self.q_down = self.q_norm = None
        if mla.q_rank is not None:
            self.q_down = nn.Linear(config.hidden, mla.q_rank, bias=config.qkv_bias)
            self.q_norm = Norm(mla.q_rank, kind="rms", eps=LATENT_NORM_EPS)
        self.q = nn.Linear(mla.q_rank or config.hidden, query_rows, bias=False)
        self.kv_down = nn.Linear(config.hidden, mla.kv_rank + mla.rope_dim, bias=config.qkv_bias)
        self.kv_norm = Norm(mla.kv_rank, kind="rms", eps=LATENT_NORM_EPS)
        self.kv_up = nn.Linear(mla.kv_rank, config.heads * (mla.nope_dim + mla.v_dim), bias=False)
        self.out = nn.Linear(config.heads * mla.v_dim, config.hidden, bias=config.out_bias)

    def forward(self, x_BTH: Tensor, cos_sin: CosSin | None, attend: Attend, layer: int) -> Tensor:
        assert cos_sin is not None
        angles = cos_sin[False]
        q_BTNP, q_BTNR = self._queries(x_BTH, angles)
        latent_BTC, k_BT1R = self._latents(x_BTH, angles)
        if isinstance(attend, OverLatents):
            mixed_BTNV = self._absorbed(q_BTNP, q_BTNR, latent_BTC, k_BT1R, attend, layer)
        else:
            mixed_BTNV = self._expanded(q_BTNP, q_BTNR, latent_BTC, k_BT1R, attend, layer)
        return self.out(mixed_BTNV.flatten(2))

    def _queries(self, x_BTH: Tensor, angles: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Without positions and with."""
        if self.q_down is not None:
            assert self.q_norm is not None
            x_BTH = self.q_norm(self.q_down(x_BTH))
        q = self.q(x_BTH).unflatten(-1, (-1, self.mla.nope_dim + self.mla.rope_dim))
        q_BTNP, q_BTNR = q.split([self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        return q_BTNP, rotate(q_BTNR, *angles, interleaved=self.interleaved)

    def _latents(self, x_BTH: Tensor, angles: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Normed latents, and the rotary key of all heads."""
        latent_BTC, k_BTR = self.kv_down(x_BTH).split([self.mla.kv_rank, self.mla.rope_dim], dim=-1)
        both = self.for_all_heads(torch.cat((self.kv_norm(latent_BTC), k_BTR), dim=-1))
        latent_BTC, k_BTR = both.split([self.mla.kv_rank, self.mla.rope_dim], dim=-1)
        return latent_BTC, rotate(k_BTR[:, :, None], *angles, interleaved=self.interleaved)

    def for_all_heads(self, latent_BTL: Tensor) -> Tensor:
        """Latents as every head reads them; tensor parallelism, which shards heads, replaces this."""
        return latent_BTL

    def _expanded(
        self, q_BTNP: Tensor, q_BTNR: Tensor, latent_BTC: Tensor, k_BT1R: Tensor, attend: Attend, layer: int
    ) -> Tensor:
        kv = self.kv_up(latent_BTC).unflatten(-1, (-1, self.mla.nope_dim + self.mla.v_dim))
        k_BTNP, v_BTNV = kv.split([self.mla.nope_dim, self.mla.v_dim], dim=-1)
        k_BTND = torch.cat((k_BTNP, k_BT1R.expand(-1, -1, k_BTNP.shape[2], -1)), dim=-1)
        return attend(layer, torch.cat((q_BTNP, q_BTNR), dim=-1), k_BTND, v_BTNV, self.options())

    def _absorbed(
        self, q_BTNP: Tensor, q_BTNR: Tensor, latent_BTC: Tensor, k_BT1R: Tensor, attend: OverLatents, layer: int
    ) -> Tensor:
        """One KV head for all queries, whose values are the first kv_rank dims of its keys."""
        keys_NPC, values_NVC = up_projections(self._up_weight(), self.mla.nope_dim, self.mla.v_dim)
        q_BTNL = torch.cat((torch.einsum("btnp,npc->btnc", q_BTNP, keys_NPC), q_BTNR), dim=-1)
        k_BT1L = torch.cat((latent_BTC[:, :, None], k_BT1R), dim=-1)
        mixed_BTNC = attend(layer, q_BTNL, k_BT1L, k_BT1L[..., : self.mla.kv_rank], self.options())
        return torch.einsum("btnc,nvc->btnv", mixed_BTNC, values_NVC)

    def _up_weight(self) -> Tensor:
        """As queries are multiplied by it: with the adapters of `model.lora`, where it has some."""
        merged = getattr(self.kv_up, "merged_weight", None)
        return self.kv_up.weight if merged is None else merged()  # type: ignore[no-any-return]

    def options(self) -> AttentionOptions:
        """What this layer asks of attention; documents and masks are the batch's."""
        return AttentionOptions(scale=self.scale)


def up_projections(kv_up: Tensor, nope_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """(of keys [N, P, C], of values [N, V, C]): views of the fused weight, whose rows are [key, value] per head."""
    heads = kv_up.unflatten(0, (-1, nope_dim + v_dim))
    return heads[:, :nope_dim], heads[:, nope_dim:]
