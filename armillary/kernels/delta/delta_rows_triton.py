"""Gated delta-net layers of a serving step in two launches: convolution, delta rule, norm and gate of every sequence
and value head, then the inputs that the next convolution needs.

A program keeps its head's state in registers and goes through its sequence's tokens one after the other, so that
prompts and decodes are one kernel whose launch depends on shapes alone: it can be captured in a CUDA graph. Heads that
share a key head read the same inputs, which is why the second launch, not the first, replaces them.
"""

import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on, power_of_two
from armillary.kernels.delta.delta_rows import DeltaWeights, RowBatch, RowStates

# T tokens, D key dim, E value dim, R value heads per key head, W tokens of the convolution, C channels

_CHANNELS = 512  # of a program that replaces inputs


@triton.jit
def _convolved(fused, inputs, conv, start, t, begins, fused_stride, column, channel, C: tl.constexpr, W: tl.constexpr):
    """SiLU of the convolution at token t of a sequence, for the channels at `column` of the projection; `inputs` are
    the last W - 1 before its first token."""
    total = tl.zeros(column.shape, tl.float32)
    for back in tl.static_range(W):
        index = t - back
        here = tl.load(fused + (start + index) * fused_stride + column, mask=(column >= 0) & (index >= 0), other=0.0)
        before = tl.load(inputs + (W - 1 + index) * C + channel, mask=(channel >= 0) & (index < 0) & ~begins, other=0.0)
        weight = tl.load(conv + channel * W + (W - 1 - back)).to(tl.float32)
        total += (here.to(tl.float32) + before.to(tl.float32)) * weight
    return total * tl.sigmoid(total)


@triton.jit
def _rows(
    fused,
    inputs,
    matrices,
    conv,
    log_rate,
    rate_bias,
    norm,
    out,
    rows,
    starts,
    lengths,
    eps,
    fused_stride,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    ONE_EACH: tl.constexpr,
):
    """Program (value head, sequence). ONE_EACH: the outputs of padding, which has a token per sequence, are zeros."""
    head, b = tl.program_id(0), tl.program_id(1)
    start, end, length = tl.load(starts + b).to(tl.int64), tl.load(starts + b + 1), tl.load(lengths + b)
    row, count = tl.load(rows + b).to(tl.int64), (end - start).to(tl.int32)
    group, part = head // R, head % R
    d, e = tl.arange(0, D), tl.arange(0, E)
    if ONE_EACH and count == 0:
        tl.store(out + (b * HEADS + head) * E + e, tl.zeros([E], tl.float32).to(out.dtype.element_ty))
    if count > 0:
        C: tl.constexpr = HEADS // R * (2 * D + R * E)
        column, channel = group * (2 * D + 2 * R * E + 2 * R), group * (2 * D + R * E)
        begins = length <= count
        place = matrices + (row * HEADS + head) * D * E + d[:, None] * E + e[None, :]
        state = tl.load(place, mask=(d[:, None] >= 0) & ~begins, other=0.0)
        before = inputs + row * (W - 1) * C
        rate = -tl.exp(tl.load(log_rate + head).to(tl.float32))
        bias = tl.load(rate_bias + head).to(tl.float32)
        weight = tl.load(norm + e).to(tl.float32)
        v_at = 2 * D + part * E + e
        for t in range(count):
            q = _convolved(fused, before, conv, start, t, begins, fused_stride, column + d, channel + d, C, W)
            k = _convolved(fused, before, conv, start, t, begins, fused_stride, column + D + d, channel + D + d, C, W)
            v = _convolved(fused, before, conv, start, t, begins, fused_stride, column + v_at, channel + v_at, C, W)
            here = fused + (start + t) * fused_stride + column + 2 * D
            z = tl.load(here + (R + part) * E + e).to(tl.float32)
            beta = tl.sigmoid(tl.load(here + 2 * R * E + part).to(tl.float32))
            x = tl.load(here + 2 * R * E + R + part).to(tl.float32) + bias
            decay = tl.exp(rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (1.0 / tl.sqrt(D * 1.0))
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            state = state * decay
            u = beta * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * u[None, :]
            mixed = tl.sum(state * q[:, None], 0)
            normed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / E + eps) * weight
            gated = normed * z * tl.sigmoid(z)
            tl.store(out + ((start + t) * HEADS + head) * E + e, gated.to(out.dtype.element_ty))
        tl.store(place, state)


@triton.jit
def _replace_inputs(
    fused,
    inputs,
    rows,
    starts,
    lengths,
    fused_stride,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    EXTRA: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (channels, sequence): the last W - 1 inputs, of this step or from before it. A slot is read before it is
    written: what moves comes from a later one."""
    channel, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    start, end, length = tl.load(starts + b).to(tl.int64), tl.load(starts + b + 1), tl.load(lengths + b)
    row, count = tl.load(rows + b).to(tl.int64), (end - start).to(tl.int32)
    there, column = channel < C, channel + channel // GROUP * EXTRA
    for slot in tl.static_range(W - 1):
        index = count - (W - 1) + slot
        new = tl.load(fused + (start + index) * fused_stride + column, mask=there & (index >= 0), other=0.0)
        moved = there & (index < 0) & (length > count)
        old = tl.load(inputs + (row * (W - 1) + W - 1 + index) * C + channel, mask=moved, other=0.0)
        value = tl.where(index >= 0, new.to(tl.float32), old.to(tl.float32))
        to = inputs + (row * (W - 1) + slot) * C + channel
        tl.store(to, value.to(inputs.dtype.element_ty), mask=there & (count > 0))


def delta_rows(fused_TX: Tensor, weights: DeltaWeights, states: RowStates, batch: RowBatch) -> Tensor:
    """`kernels.delta.delta_rows.delta_rows` on the device of its inputs."""
    heads, value_heads = weights.heads, len(weights.log_rate_V)
    sequences, one_each = len(batch.rows_B), batch.max_query == 1
    shape = (len(fused_TX), value_heads * heads.value_dim)
    out = (fused_TX.new_empty if one_each else fused_TX.new_zeros)(shape)
    channels, width = weights.conv_CW.shape
    key_heads = value_heads // heads.values
    with on(fused_TX):
        _rows[(value_heads, sequences)](
            fused_TX,
            states.inputs_RSC,
            states.matrices_RVDE,
            weights.conv_CW,
            weights.log_rate_V,
            weights.rate_bias_V,
            weights.norm_E,
            out,
            batch.rows_B,
            batch.starts,
            batch.lengths_B,
            weights.eps,
            fused_TX.stride(0),
            HEADS=value_heads,
            R=heads.values,
            D=heads.key_dim,
            E=heads.value_dim,
            W=width,
            ONE_EACH=one_each,
            num_warps=8 if heads.key_dim * heads.value_dim >= 8192 else 4,
        )
        block = min(_CHANNELS, power_of_two(channels))
        _replace_inputs[(ceil_div(channels, block), sequences)](
            fused_TX,
            states.inputs_RSC,
            batch.rows_B,
            batch.starts,
            batch.lengths_B,
            fused_TX.stride(0),
            C=channels,
            GROUP=channels // key_heads,
            EXTRA=fused_TX.shape[1] // key_heads - channels // key_heads,
            W=width,
            BLOCK=block,
        )
    return out
