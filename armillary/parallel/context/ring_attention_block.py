"""One block of ring attention: some queries over some keys, as a part of a larger softmax. Outputs come with their
log Σ exp, so parts can be merged, and gradients use the log Σ exp and output of the full softmax.

Scores are materialized for a bounded number of queries at a time. A GPU uses our attention kernels for queries and keys
of one piece of a row, and where nothing is masked inside a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.requirements import has_triton

# B batch, T queries, S keys, N query heads, K KV heads, G query heads per KV head, D head dim

_MAX_SCORES = 1 << 26
"""scores that are materialized at once"""
_LN2 = math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The attention settings of a layer, as numbers and tensors."""

    scale: float  # multiplies q·k
    window: int = 0  # keys that a query attends to, itself included; 0: all before it
    softcap: float = 0.0  # c·tanh(x/c) on the scores; 0: none
    slopes_N: Tensor | None = None  # ALiBi: score -= slope · distance


@dataclass(frozen=True, kw_only=True)
class BlockPosition:
    """Position of the queries and keys of a block in their row."""

    distance: int  # from the first key to the first query
    causal: bool  # queries and keys are those of the same tokens, so keys may lie after queries
    queries_BT: Tensor | None = None  # document of each query; None: the row is one document
    keys_BS: Tensor | None = None  # document of each key

    def queries(self, start: int, stop: int) -> BlockPosition:
        """The same for some of the queries."""
        queries_BT = None if self.queries_BT is None else self.queries_BT[:, start:stop]
        return BlockPosition(
            distance=self.distance + start, causal=self.causal, queries_BT=queries_BT, keys_BS=self.keys_BS
        )

    def is_visible(self, num_keys: int, window: int) -> bool:
        """Whether any query attends to any key."""
        return not window or self.distance - (num_keys - 1) < window

    def is_unmasked(self, num_queries: int, window: int) -> bool:
        """Whether every query attends to every key."""
        return not self.causal and self.queries_BT is None and (not window or self.distance + num_queries <= window)


def forward(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: Options, position: BlockPosition
) -> tuple[Tensor, Tensor]:
    """(output [B, T, N, D], log Σ exp [B, N, T]), both at least fp32; a query that sees no key gives 0 and -inf."""
    if _has_kernel(q_BTND, v_BSKD, options, position):
        return _kernel_forward(q_BTND, k_BSKD, v_BSKD, options, position)
    parts = [
        _forward(q_BTND[:, rows], k_BSKD, v_BSKD, options, position.queries(rows.start, rows.stop))
        for rows in _blocks(q_BTND, k_BSKD)
    ]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2)


@dataclass(frozen=True, kw_only=True)
class FullSoftmax:
    """What the gradients of a block need of the full softmax, for some queries."""

    grad_BTND: Tensor
    out_BTND: Tensor
    lse_BNT: Tensor
    delta_BNT: Tensor  # Σ_D grad · output

    @classmethod
    def of(cls, grad_BTND: Tensor, out_BTND: Tensor, lse_BNT: Tensor) -> FullSoftmax:
        delta_BNT = (widen(grad_BTND) * out_BTND).sum(-1).transpose(1, 2)
        return cls(grad_BTND=grad_BTND, out_BTND=out_BTND, lse_BNT=lse_BNT, delta_BNT=delta_BNT)

    def queries(self, rows: slice) -> FullSoftmax:
        return FullSoftmax(
            grad_BTND=self.grad_BTND[:, rows],
            out_BTND=self.out_BTND[:, rows],
            lse_BNT=self.lse_BNT[:, :, rows],
            delta_BNT=self.delta_BNT[:, :, rows],
        )


def backward(
    softmax: FullSoftmax, q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: Options, position: BlockPosition
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v by this block, at least fp32."""
    if _has_kernel(q_BTND, v_BSKD, options, position):
        return _kernel_backward(softmax, q_BTND, k_BSKD, v_BSKD, options, position)
    dk, dv = (torch.zeros_like(widen(x), memory_format=torch.contiguous_format) for x in (k_BSKD, v_BSKD))
    dq = []
    for rows in _blocks(q_BTND, k_BSKD):
        part = position.queries(rows.start, rows.stop)
        dq_part, dk_part, dv_part = _backward(softmax.queries(rows), q_BTND[:, rows], k_BSKD, v_BSKD, options, part)
        dq.append(dq_part)
        dk += dk_part
        dv += dv_part
    return torch.cat(dq, dim=1), dk, dv


def _blocks(q_BTND: Tensor, k_BSKD: Tensor) -> Iterator[slice]:
    (B, T, N, _), S = q_BTND.shape, k_BSKD.shape[1]
    size = max(1, _MAX_SCORES // (B * N * S))
    return (slice(start, min(T, start + size)) for start in range(0, T, size))


def _grouped(x_BTND: Tensor, num_kv: int) -> Tensor:
    return x_BTND.unflatten(2, (num_kv, -1))


def _scores(q_BTKGD: Tensor, k_BSKD: Tensor, options: Options, position: BlockPosition) -> tuple[Tensor, Tensor | None]:
    """(scores [B, K, G, T, S] with -inf where nothing is visible, tanh of the capped ones)."""
    scores = widen(torch.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD)) * options.scale
    bent = None
    if options.softcap:
        bent = torch.tanh(scores / options.softcap)
        scores = options.softcap * bent
    T, S = scores.shape[-2:]
    if position.is_unmasked(T, options.window) and options.slopes_N is None:
        return scores, bent
    distance_TS = (
        position.distance + torch.arange(T, device=scores.device)[:, None] - torch.arange(S, device=scores.device)
    )
    if options.slopes_N is not None:
        slopes_KG = options.slopes_N.to(scores.dtype).view(1, k_BSKD.shape[2], -1, 1, 1)
        scores = scores - slopes_KG * distance_TS
    return scores.masked_fill(~_visible(distance_TS, options.window, position), -torch.inf), bent


def _visible(distance_TS: Tensor, window: int, position: BlockPosition) -> Tensor:
    visible = distance_TS >= 0
    if window:
        visible = visible & (distance_TS < window)
    if position.queries_BT is None or position.keys_BS is None:
        return visible
    return visible & (position.queries_BT[:, None, None, :, None] == position.keys_BS[:, None, None, None, :])


def _forward(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: Options, position: BlockPosition
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(_grouped(q_BTND, k_BSKD.shape[2]), k_BSKD, options, position)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - finite(lse)[..., None])
    out = widen(torch.einsum("bkgts,bskd->btkgd", weights.to(v_BSKD.dtype), v_BSKD))
    return out.flatten(2, 3), lse.flatten(1, 2)


def _backward(
    softmax: FullSoftmax, q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: Options, position: BlockPosition
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv, half = k_BSKD.shape[2], q_BTND.dtype
    q, grad = _grouped(q_BTND, num_kv), _grouped(softmax.grad_BTND.to(half), num_kv)
    scores, bent = _scores(q, k_BSKD, options, position)
    weights = torch.exp(scores - finite(softmax.lse_BNT).unflatten(1, (num_kv, -1))[..., None])
    dv = widen(torch.einsum("bkgts,btkgd->bskd", weights.to(half), grad))
    dweights = widen(torch.einsum("btkgd,bskd->bkgts", grad, v_BSKD))
    dscores = weights * (dweights - softmax.delta_BNT.unflatten(1, (num_kv, -1))[..., None])
    if bent is not None:
        dscores = dscores * (1.0 - bent * bent)
    dscores = (dscores * options.scale).to(half)
    dq = widen(torch.einsum("bkgts,bskd->btkgd", dscores, k_BSKD)).flatten(2, 3)
    dk = widen(torch.einsum("bkgts,btkgd->bskd", dscores, q))
    return dq, dk, dv


def finite(lse: Tensor) -> Tensor:
    """0 in position of -inf, for queries without keys: exp(-inf - 0) is the 0 that is needed, -inf - -inf is NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one softmax as one."""
    both = torch.logaddexp(lse, more_lse)
    first, second = (torch.exp(part - finite(both)).transpose(1, 2)[..., None] for part in (lse, more_lse))
    return out * first + more * second, both


# --- on a GPU


def _has_kernel(q: Tensor, v: Tensor, options: Options, position: BlockPosition) -> bool:
    """Queries over the keys of their own piece with any settings; over another piece where nothing is masked."""
    if q.shape[-1] != v.shape[-1]:
        return False
    clear = position.causal or (position.is_unmasked(q.shape[1], options.window) and options.slopes_N is None)
    return has_triton(q.device) and clear and q.dtype != torch.float64 and q.shape[-1] <= 256


def _kernel_forward(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: Options, position: BlockPosition
) -> tuple[Tensor, Tensor]:
    from armillary.kernels.attention import attention_triton as attention_own  # needs triton

    out, lse2 = attention_own._attention(q_BTND, k_BSKD, v_BSKD, *_arguments(options, position))
    return widen(out), lse2 * _LN2


def _kernel_backward(
    softmax: FullSoftmax, q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: Options, position: BlockPosition
) -> tuple[Tensor, Tensor, Tensor]:
    from armillary.kernels.attention import attention_triton as attention_own

    grad, out, lse2 = softmax.grad_BTND.to(q_BTND.dtype), softmax.out_BTND.to(q_BTND.dtype), softmax.lse_BNT / _LN2
    dq, dk, dv, _ = attention_own._attention_backward(
        grad, out.contiguous(), lse2.contiguous(), q_BTND, k_BSKD, v_BSKD, *_arguments(options, position)
    )
    return widen(dq), widen(dk), widen(dv)


def _arguments(options: Options, position: BlockPosition) -> tuple[object, ...]:
    """(documents, blocks, sinks, slopes, scale, window, cap, whether later keys are hidden)."""
    if not position.causal:
        return None, None, None, None, options.scale, 0, options.softcap, False
    return position.queries_BT, None, None, options.slopes_N, options.scale, options.window, options.softcap, True
