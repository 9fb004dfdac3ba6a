"""What plain torch operators move: the bytes and calls of our layers on a processor, where nothing is fused.

Every operator reads its inputs and writes its result, so a norm that one kernel would do in a single pass takes six
forward and fourteen backward. Counted from the operators, an element at a time; norms, rotations and the loss work in
fp32, and autocast brings products to 16 bits. A test counts them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from armillary.spec.arithmetic.ops import Op, size_of
from armillary.spec.model import ModelConfig

W = 4.0
"""bytes of a number in fp32"""
NORM_FLOPS = {"rms": 4, "layer": 7}
"""of spec.layer_ops.norm, an element"""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One operation as torch's operators run it."""

    forward: float = 0.0
    """bytes"""
    backward: float = 0.0
    """bytes"""
    calls_forward: float = 0.0
    """operators"""
    calls_backward: float = 0.0
    """operators"""


def moved(config: ModelConfig, op: Op) -> Moved:
    """By the forward operation; of a product or of attention, what surrounds it."""
    make = _KINDS.get(op.kind)
    if make is None:  # router, rows to experts and back: what they must move, both ways
        return Moved(forward=op.bytes, backward=op.bytes, calls_forward=4, calls_backward=4)
    return make(config, op, size_of(op.dtype))


def _product(config: ModelConfig, op: Op, size: float) -> Moved:
    """The weight rounded for the forward pass, its gradient widened behind the backward pass. The fused projection is
    then cut: queries are copied, and gradients of its three parts each padded to the whole and added."""
    groups, m, n, k = op.shape
    casts, weights = float(size < W) * groups, groups * n * k * (W + size) * (size < W)
    copies, pads = (2 * size * m * config.heads * config.head_dim, 10 * size * m * n) if op.name == "qkv" else (0, 0)
    return Moved(
        forward=weights + copies,
        backward=weights + pads,
        calls_forward=casts + (copies > 0),
        calls_backward=casts + 5 * (pads > 0),
    )


def _nothing(config: ModelConfig, op: Op, size: float) -> Moved:
    return Moved()


def _norm(config: ModelConfig, op: Op, size: float) -> Moved:
    """RMSNorm: square, mean, times its root, times the weight, and what autograd makes of each; LayerNorm is one
    operator. What it gives is rounded for the product that follows; the residual stream stays wide."""
    numbers = op.bytes_written / size
    residual = abs(op.flops - (NORM_FLOPS[config.norm] + 1) * numbers / 2) < 0.01 * op.flops
    numbers = numbers / 2 if residual else numbers
    cast, narrow = (W + size, 1) if size < W else (0.0, 0)
    forward, backward, calls = (7 * W, 24 * W, (6, 14)) if config.norm == "rms" else (2 * W, 3 * W, (1, 1))
    if op.name == "qk_norm":  # queries and keys apart, copied first; they come in 16 bits and leave in them
        return Moved(
            forward=numbers * (forward + 2 * cast + 2 * size),
            backward=numbers * (backward + 2 * cast),
            calls_forward=2 * (calls[0] + 2 * narrow + 1),
            calls_backward=2 * (calls[1] + 2 * narrow),
        )
    more = (2 * W + size, 3 * W + cast) if residual else (0.0, 0.0)
    return Moved(
        forward=numbers * (forward + cast + more[0]),
        backward=numbers * (backward + cast + more[1]),
        calls_forward=calls[0] + narrow + residual,
        calls_backward=calls[1] + narrow + residual * (1 + narrow),
    )


def _elementwise(config: ModelConfig, op: Op, size: float) -> Moved:
    numbers = op.bytes_written / size
    if op.name == "rope":
        return _rope(config, numbers, size)
    if op.name.endswith(".act"):
        return _activation(config, numbers, size, gated=op.bytes_read > 1.5 * op.bytes_written)
    return Moved(forward=3 * size * numbers, backward=0.0, calls_forward=1)  # a sum hands its gradient to both sides


def _rope(config: ModelConfig, numbers: float, size: float) -> Moved:
    """Queries and keys one after the other: four products of halves, a difference, a sum, put together again."""
    cast = W + size if size < W else 0.0
    backward = (14.5 if config.rope.interleaved else 10.5) * W
    calls = 2 * (10 if config.rope.interleaved else 8)
    casts = 4 * (cast > 0)
    return Moved(
        forward=numbers * (9.5 * W + 2 * cast),
        backward=numbers * (backward + 2 * cast),
        calls_forward=14 + casts,
        calls_backward=calls + casts,
    )


def _activation(config: ModelConfig, numbers: float, size: float, *, gated: bool) -> Moved:
    """Gate and up alternate, so both are copied out first; backward they are put together again."""
    forward, backward, calls = {"relu2": (4, 10, (2, 4)), "swiglu_clamped": (15, 25, (7, 9))}.get(
        config.activation, (2, 3, (1, 1))
    )
    if gated:
        forward, backward, calls = forward + 7, backward + 10, (calls[0] + 3, calls[1] + 3)
    return Moved(
        forward=numbers * forward * size,
        backward=numbers * backward * size,
        calls_forward=calls[0],
        calls_backward=calls[1],
    )


def _loss(config: ModelConfig, op: Op, size: float) -> Moved:
    """Logits widened, log-softmax, the targets' picked; backward zeros with one entry a row, then the softmax's."""
    numbers, cast = op.flops / 4, W + size if size < W else 0.0
    return Moved(
        forward=numbers * (3 * W + cast),
        backward=numbers * (5 * W + cast),
        calls_forward=2 + (cast > 0),
        calls_backward=2 + (cast > 0),
    )


def _embedding(config: ModelConfig, op: Op, size: float) -> Moved:
    """Rows in fp32; their gradients added into a table of zeros as large as the vocabulary's."""
    rows = op.bytes_written / size * W
    return Moved(forward=2 * rows, backward=rows + W * config.vocab * config.hidden, calls_forward=1, calls_backward=1)


_KINDS = {
    "matmul": _product,
    "attention": _nothing,
    "norm": _norm,
    "elementwise": _elementwise,
    "loss": _loss,
    "embedding": _embedding,
}
