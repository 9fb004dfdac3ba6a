"""A Llama in plain torch, the peer of train_one_gpu.py: what one would write by hand without kernels of one's own.

bf16 weights, blocks to be compiled one by one, cuDNN attention, and a loss whose logits are made chunk by chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from armillary.spec.model import ModelConfig

CHUNK = 4096
"""tokens whose logits exist at once"""


class Block(nn.Module):
    """Attention and a SwiGLU MLP, each after a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.hidden, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).split(
            [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], dim=-1
        )
        q, k, v = (part.view(batch, length, -1, self.dim).transpose(1, 2) for part in (q, k, v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.dim = config.head_dim
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        frequencies = 1e4 ** (-torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


def loss_of(model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
    hidden, flat = model(tokens).flatten(0, 1), targets.flatten()
    parts = (
        checkpoint(_part, model.head, some, wanted, use_reentrant=False)
        for some, wanted in zip(hidden.split(CHUNK), flat.split(CHUNK), strict=True)
    )
    return torch.stack(list(parts)).sum() / flat.numel()


def _part(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")
