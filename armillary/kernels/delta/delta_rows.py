"""Gated delta-net layers of a serving step: the tokens of several sequences, one after the other, each of which
continues from its row's state and leaves the new one there.

`delta_rows` takes the projected inputs and returns what the output projection multiplies. A sequence whose first token
of this step is its first of all begins with nothing, whatever its row holds: rows need no clearing.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.delta.gated_delta import DeltaHeads, DeltaState, gated_delta
from armillary.spec.arithmetic.delta_ops import delta_decode, delta_rule
from armillary.spec.model import GatedDelta

# T tokens, B sequences, R rows, X projected inputs, C channels, S inputs that the convolution keeps, V value heads,
# D key dim, E value dim


class DeltaWeights(NamedTuple):
    """A layer's weights beside its two projections."""

    conv_CW: Tensor
    log_rate_V: Tensor
    rate_bias_V: Tensor
    norm_E: Tensor
    eps: float
    heads: DeltaHeads


class RowStates(NamedTuple):
    """States of one layer by row; written in place."""

    inputs_RSC: Tensor
    matrices_RVDE: Tensor  # fp32


class RowBatch(NamedTuple):
    """Which rows the tokens of a step continue: sequence b has the tokens starts[b] … starts[b + 1] − 1 and lengths[b]
    tokens with them. Padding has no tokens, or one each where `max_query` is 1."""

    rows_B: Tensor
    starts: Tensor
    lengths_B: Tensor
    max_query: int


def split_inputs(
    fused: Tensor, heads: DeltaHeads, log_rate_V: Tensor, rate_bias_V: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys and values [..., C], output gates [..., V, E], decays as logarithms [..., V], β [..., V]) of the
    fused projection, whose columns are [q, k, v…, z…, b…, a…] per key head."""
    grouped = fused.unflatten(-1, (-1, heads.channels + heads.values * (heads.value_dim + 2)))
    sizes = [heads.channels, heads.values * heads.value_dim, heads.values, heads.values]
    qkv, z, b, a = (part.flatten(-2) for part in grouped.split(sizes, dim=-1))
    decay = -widen(log_rate_V).exp() * F.softplus(widen(a) + widen(rate_bias_V))
    return qkv, z.unflatten(-1, (-1, heads.value_dim)), decay, widen(b).sigmoid()


def delta_rows(fused_TX: Tensor, weights: DeltaWeights, states: RowStates, batch: RowBatch) -> Tensor:
    """[T, V·E]: norm(out) · SiLU(z)."""
    qkv_TC, z_TVE, decay_TV, beta_TV = split_inputs(fused_TX, weights.heads, weights.log_rate_V, weights.rate_bias_V)
    mixed_TVE = torch.zeros_like(z_TVE)
    for tokens_BN, members in _alike(batch, len(fused_TX)):
        state = _state(states, batch, members, tokens_BN.shape[1])
        args = (qkv_TC[tokens_BN], decay_TV[tokens_BN], beta_TV[tokens_BN])
        mixed_TVE[tokens_BN], left = gated_delta(*args, weights.conv_CW, weights.heads, state=state)
        rows = batch.rows_B[members].long()
        states.inputs_RSC[rows] = left.inputs_BSC.to(states.inputs_RSC.dtype)
        states.matrices_RVDE[rows] = left.matrix_BVDE.to(states.matrices_RVDE.dtype)
    wide = widen(mixed_TVE)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.eps) * widen(weights.norm_E)
    return (normed.to(fused_TX.dtype) * F.silu(widen(z_TVE))).to(fused_TX.dtype).flatten(1)


def _alike(batch: RowBatch, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """(token numbers [B', N], which sequences): those with one token each together, others one by one."""
    device = batch.rows_B.device
    if batch.max_query == 1:
        everyone = torch.arange(num_tokens, device=device)
        return [(everyone[:, None], everyone)]
    starts = batch.starts.tolist()
    sizes = [end - begin for begin, end in pairwise(starts)]
    singles = [b for b, size in enumerate(sizes) if size == 1]
    parts = [([[starts[b]] for b in singles], singles)] if singles else []
    parts += [([list(range(starts[b], starts[b + 1]))], [b]) for b, size in enumerate(sizes) if size > 1]
    return [(torch.tensor(tokens, device=device), torch.tensor(members, device=device)) for tokens, members in parts]


def _state(states: RowStates, batch: RowBatch, members: Tensor, count: int) -> DeltaState:
    """Of the rows of these sequences, each with `count` tokens; nothing for those that begin."""
    rows, begins = batch.rows_B[members].long(), batch.lengths_B[members] <= count
    inputs, matrices = states.inputs_RSC[rows], states.matrices_RVDE[rows]
    return DeltaState(
        inputs.masked_fill(begins[:, None, None], 0), matrices.masked_fill(begins[:, None, None, None], 0)
    )


@dataclass(frozen=True, kw_only=True)
class DeltaRowsCase(Case):
    """Sequences that each add some tokens to a state."""

    sequences: int
    tokens: int = 1
    key_heads: int = 16
    values: int = 2
    key_dim: int = 128
    value_dim: int = 128
    conv: int = 4

    @property
    def delta(self) -> GatedDelta:
        return GatedDelta(
            key_heads=self.key_heads,
            value_heads=self.key_heads * self.values,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv=self.conv,
        )


def _inputs(case: DeltaRowsCase, generator: torch.Generator) -> tuple[Any, ...]:
    """Every other sequence begins."""
    device, delta, heads = generator.device, case.delta, DeltaHeads(case.key_dim, case.value_dim, case.values)
    columns = delta.channels + delta.value_heads * (delta.value_dim + 2)
    shape = (case.sequences + 1, delta.value_heads, delta.key_dim, delta.value_dim)
    weights = DeltaWeights(
        conv_CW=case.normal(generator, delta.channels, delta.conv) * 0.5,
        log_rate_V=case.normal(generator, delta.value_heads),
        rate_bias_V=case.normal(generator, delta.value_heads),
        norm_E=1 + 0.1 * case.normal(generator, delta.value_dim),
        eps=1e-6,
        heads=heads,
    )
    states = RowStates(
        case.normal(generator, case.sequences + 1, delta.conv - 1, delta.channels),
        torch.randn(shape, generator=generator, device=device) * 0.3,
    )
    earlier = torch.arange(case.sequences, device=device) % 2 * 100
    batch = RowBatch(
        torch.randperm(case.sequences, generator=generator, device=device).int(),
        torch.arange(case.sequences + 1, device=device).int() * case.tokens,
        (earlier + case.tokens).int(),
        case.tokens,
    )
    return case.normal(generator, case.sequences * case.tokens, columns), weights, states, batch


def _work(case: DeltaRowsCase) -> OpWork:
    sizes = {"sequences": case.sequences, "dtype": case.dtype}
    if case.tokens == 1:
        return OpWork.of(delta_decode("decode", case.delta, **sizes))  # type: ignore[arg-type]
    rule = delta_rule("prefill", case.delta, tokens=case.sequences * case.tokens, **sizes)  # type: ignore[arg-type]
    return OpWork.of(rule, ceiling="gemm")


def _refuses(case: DeltaRowsCase) -> str | None:
    sizes = (case.key_dim, case.value_dim)
    powers = all(size & (size - 1) == 0 and size >= 16 for size in sizes)
    return None if powers and case.dtype != "fp64" else f"heads of {sizes[0]} and {sizes[1]}: powers of 2 from 16"


DELTA_ROWS = Op(
    name="delta_rows",
    reference=delta_rows,
    versions=(in_triton("delta.delta_rows_triton", "delta_rows", refuses=_refuses),),
    inputs=_inputs,
    work=_work,
    writes=(2,),
    cases={
        "Qwen3-Next, 1 decoding": DeltaRowsCase(sequences=1),
        "Qwen3-Next, 64 decoding": DeltaRowsCase(sequences=64),
        "Qwen3-Next, 256 decoding": DeltaRowsCase(sequences=256),
        "Qwen3-Next, a prompt of 4k": DeltaRowsCase(sequences=1, tokens=4096),
    },
)
