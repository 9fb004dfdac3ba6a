"""The gated delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464) behind a short causal convolution.

Every value head keeps a matrix S [D, E]. A token decays it, corrects what it holds under its key, and reads it:
S ← e^decay · S;  S ← S + k ⊗ β (v − Sᵀk);  out = Sᵀq. Queries and keys are normalised to length 1, queries divided by
√D; queries, keys and values come out of a depthwise convolution over the last few tokens, and SiLU. `recurrent` is this
definition, token by token; `chunked` computes the tokens of a chunk together and is what training and prefill use.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen

# B batch, T tokens, C channels, W tokens of the convolution, K key heads, V value heads, D key dim, E value dim,
# N chunks, L tokens of a chunk

CHUNK = 64
"""tokens of a chunk: its triangular system is solved by one kernel, and chunks follow each other"""
LENGTH_EPS = 1e-6
"""added to the squared length of queries and keys (the reference implementation's)"""


class DeltaHeads(NamedTuple):
    """Sizes of one group of channels: a key head [q, k] and the value heads that share it."""

    key_dim: int
    value_dim: int
    values: int  # value heads per key head

    @property
    def channels(self) -> int:
        """Channels of a group, [q, k, v…]."""
        return 2 * self.key_dim + self.values * self.value_dim


class DeltaState(NamedTuple):
    """What a sequence keeps of its past: the last inputs of the convolution, and the matrices in fp32."""

    inputs_BSC: Tensor  # S = W - 1
    matrix_BVDE: Tensor


def gated_delta(
    qkv_BTC: Tensor,
    decay_BTV: Tensor,
    beta_BTV: Tensor,
    conv_CW: Tensor,
    heads: DeltaHeads,
    *,
    state: DeltaState | None = None,
    documents_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, DeltaState]:
    """(out [B, T, V, E] in the dtype of qkv, the state after the last token), from `state` on or from nothing.
    `documents_BT` numbers the documents of packed rows, each of which begins with nothing. Channels are grouped per key
    head as [q, k, v…]; `decay` is a logarithm, at most 0."""
    mixed_BTC, inputs_BSC = causal_conv(qkv_BTC, conv_CW, None if state is None else state.inputs_BSC, documents_BT)
    q, k, v = split_heads(mixed_BTC, heads)
    begins = None if documents_BT is None else first_tokens(documents_BT)
    matrix = None if state is None else state.matrix_BVDE
    run = recurrent if qkv_BTC.shape[1] == 1 else chunked
    extra = {} if run is recurrent else {"chunk": chunk}
    out, matrix = run(q, k, v, widen(decay_BTV), widen(beta_BTV), matrix, begins, **extra)  # type: ignore[operator]
    return out.to(qkv_BTC.dtype), DeltaState(inputs_BSC, matrix)


def first_tokens(documents_BT: Tensor) -> Tensor:
    """[B, T]: whether a document begins here; a row's first token continues its state."""
    begins = torch.zeros_like(documents_BT, dtype=torch.bool)
    begins[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return begins


def causal_conv(
    x_BTC: Tensor, weight_CW: Tensor, before_BSC: Tensor | None = None, documents_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(SiLU(Σ_w weight[:, w] · x[t − W + 1 + w]) in fp32 or wider, the last W − 1 inputs), after `before` or zeros."""
    width = weight_CW.shape[1]
    if before_BSC is None:
        before_BSC = x_BTC.new_zeros(x_BTC.shape[0], width - 1, x_BTC.shape[2])
    padded = torch.cat((before_BSC.to(x_BTC.dtype), x_BTC), dim=1)
    wide, weight, tokens = widen(padded), widen(weight_CW), x_BTC.shape[1]
    total = wide[:, width - 1 :] * weight[:, width - 1]
    for back in range(1, width):
        earlier = wide[:, width - 1 - back : width - 1 - back + tokens]
        if documents_BT is not None:
            numbers = F.pad(documents_BT, (back, 0))[:, :tokens]
            same = numbers == documents_BT
            same[:, :back] = documents_BT[:, :back] == documents_BT[:, :1]  # the row's first document continues
            earlier = earlier * same[..., None]
        total = total + earlier * weight[:, width - 1 - back]
    return F.silu(total), padded[:, tokens:]


def split_heads(mixed_BTC: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, T, K, D] of length 1 (queries divided by √D), and values [B, T, V, E]."""
    grouped = mixed_BTC.unflatten(-1, (-1, heads.channels))
    q, k, v = grouped.split([heads.key_dim, heads.key_dim, heads.values * heads.value_dim], dim=-1)
    v = v.unflatten(-1, (heads.values, heads.value_dim)).flatten(-3, -2)
    return _of_length_1(q) * heads.key_dim**-0.5, _of_length_1(k), v


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def recurrent(
    q_BTKD: Tensor,
    k_BTKD: Tensor,
    v_BTVE: Tensor,
    decay_BTV: Tensor,
    beta_BTV: Tensor,
    matrix_BVDE: Tensor | None = None,
    begins_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: (out [B, T, V, E], the matrices after the last token). Where a document `begins`, they are 0."""
    values = v_BTVE.shape[2] // q_BTKD.shape[2]
    q_BTVD, k_BTVD = q_BTKD.repeat_interleave(values, dim=2), k_BTKD.repeat_interleave(values, dim=2)
    state = _beginning(k_BTKD, v_BTVE, matrix_BVDE)
    outs = []
    for t in range(v_BTVE.shape[1]):
        k, v, beta = k_BTVD[:, t], v_BTVE[:, t], beta_BTV[:, t, :, None]
        state = state * decay_BTV[:, t].exp()[..., None, None]
        if begins_BT is not None:
            state = state * ~begins_BT[:, t, None, None, None]
        stored = torch.einsum("bvde,bvd->bve", state, k)
        state = state + k[..., None] * (beta * (v - stored))[:, :, None]
        outs.append(torch.einsum("bvde,bvd->bve", state, q_BTVD[:, t]))
    return torch.stack(outs, dim=1), state


def _beginning(k_BTKD: Tensor, v_BTVE: Tensor, matrix_BVDE: Tensor | None) -> Tensor:
    """The matrices before the first token: a value head's is [D, E]."""
    if matrix_BVDE is not None:
        return matrix_BVDE.to(v_BTVE.dtype)
    return v_BTVE.new_zeros(v_BTVE.shape[0], v_BTVE.shape[2], k_BTKD.shape[-1], v_BTVE.shape[-1])


def chunked(
    q_BTKD: Tensor,
    k_BTKD: Tensor,
    v_BTVE: Tensor,
    decay_BTV: Tensor,
    beta_BTV: Tensor,
    matrix_BVDE: Tensor | None = None,
    begins_BT: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same, a chunk at a time (section 3.3). With c the sum of decays within the chunk, the corrections u of its
    tokens solve (1 + A) u = β (v − e^c · Sᵀk), where A_ij = β_i · e^(c_i − c_j) · k_i·k_j for j < i; then
    out_i = e^(c_i) · Sᵀq_i + Σ_(j ≤ i) e^(c_i − c_j) (q_i·k_j) u_j."""
    tokens, values = v_BTVE.shape[1], v_BTVE.shape[2] // q_BTKD.shape[2]
    state = _beginning(k_BTKD, v_BTVE, matrix_BVDE)
    q, k, v, beta = (_in_chunks(x, chunk) for x in (q_BTKD, k_BTKD, v_BTVE, beta_BTV[..., None]))
    q, k = q.repeat_interleave(values, dim=1), k.repeat_interleave(values, dim=1)
    within, carried, left, total = _decays(decay_BTV, begins_BT, chunk)
    strictly = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril(-1)
    system = (beta * k @ k.transpose(-1, -2) * within).masked_fill(~strictly, 0)
    both = torch.cat((beta * v, beta * carried * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q_carried, k_left = q @ k.transpose(-1, -2) * within, q * carried, k * left
    outs = []
    for n in range(v.shape[2]):
        u = own[:, :, n] - of_state[:, :, n] @ state
        outs.append(q_carried[:, :, n] @ state + scores[:, :, n] @ u)
        state = total[:, :, n] * state + k_left[:, :, n].transpose(-1, -2) @ u
    return torch.cat(outs, dim=2)[:, :, :tokens].transpose(1, 2), state


def _in_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """[B, H, N, L, X], filled up with zeros: a token with β = 0 and no decay changes nothing."""
    short = -x_BTHX.shape[1] % chunk
    return F.pad(x_BTHX, (0, 0, 0, 0, 0, short)).transpose(1, 2).unflatten(2, (-1, chunk))


def _decays(decay_BTV: Tensor, begins_BT: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors of a chunk, all [B, V, N, …]: between its tokens [L, L], of the state as each token sees it [L, 1], of
    each token in the state after the chunk [L, 1], of the state after the chunk [1, 1]; 0 across documents."""
    sums = _in_chunks(decay_BTV[..., None], chunk).cumsum(3)
    last = sums[..., -1:, :]
    apart = torch.ones(chunk, chunk, dtype=torch.bool, device=sums.device).triu(1)
    carried, left, total = sums, last - sums, last
    if begins_BT is not None:
        number = _in_chunks(begins_BT[..., None, None].to(sums.dtype), chunk).cumsum(3)
        apart = apart | (number != number.transpose(-1, -2))
        carried, total = (
            x.masked_fill(number_ != 0, -torch.inf) for x, number_ in ((carried, number), (total, number[..., -1:, :]))
        )
        left = left.masked_fill(number != number[..., -1:, :], -torch.inf)
    within = (sums - sums.transpose(-1, -2)).masked_fill(apart, -torch.inf)
    return within.exp(), carried.exp(), left.exp(), total.exp()
