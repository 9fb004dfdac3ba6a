"""Bytes and calls of eager torch operators: our layers on a CPU, where nothing is fused.

Every operator reads its inputs and writes its result, so a norm that a fused kernel computes in one pass takes six
operators forward and fourteen backward. The counts are per element; norms, rotations and the loss run in fp32, and
autocast rounds the operands of GEMMs to 16 bits. A test counts the operators again.
"""

from dataclasses import dataclass

from armillary.spec.arithmetic.non_gemm_ops import NORM_FLOPS
from armillary.spec.arithmetic.ops import Op, size_of
from armillary.spec.model import ModelConfig

W = 4.0
"""bytes per fp32 element"""


@dataclass(frozen=True, kw_only=True)
class EagerBytes:
    """Bytes that eager torch operators read and write for one operation, and calls of operators."""

    forward: float = 0.0
    backward: float = 0.0
    calls_forward: float = 0.0
    calls_backward: float = 0.0


def eager_bytes(config: ModelConfig, op: Op) -> EagerBytes:
    """By the forward operation; for a GEMM or attention, the operators around it."""
    make = _KINDS.get(op.kind)
    if make is None:  # router, dispatch and combine: their compulsory bytes, both passes
        return EagerBytes(forward=op.bytes, backward=op.bytes, calls_forward=4, calls_backward=4)
    return make(config, op, size_of(op.dtype))


def _matmul(config: ModelConfig, op: Op, size: float) -> EagerBytes:
    """The weight is rounded for the forward pass and its gradient widened after the backward pass. The fused QKV
    projection is then split: queries are copied, and the gradients of its three parts each padded to full and added."""
    groups, m, n, k = op.shape
    casts, weights = float(size < W) * groups, groups * n * k * (W + size) * (size < W)
    copies, pads = (2 * size * m * config.heads * config.head_dim, 10 * size * m * n) if op.name == "qkv" else (0, 0)
    return EagerBytes(
        forward=weights + copies,
        backward=weights + pads,
        calls_forward=casts + (copies > 0),
        calls_backward=casts + 5 * (pads > 0),
    )


def _norm(config: ModelConfig, op: Op, size: float) -> EagerBytes:
    """RMSNorm: square, mean, multiply by the root, multiply by the weight, and the backward of each; LayerNorm is one
    operator. The result is rounded for the GEMM that follows; the residual stream stays wide."""
    numbers = op.bytes_written / size
    residual = abs(op.flops - (NORM_FLOPS[config.norm] + 1) * numbers / 2) < 0.01 * op.flops
    numbers = numbers / 2 if residual else numbers
    cast, narrow = (W + size, 1) if size < W else (0.0, 0)
    forward, backward, calls = (7 * W, 24 * W, (6, 14)) if config.norm == "rms" else (2 * W, 3 * W, (1, 1))
    if op.name == "qk_norm":  # queries and keys separately, copied first, with 16-bit inputs and outputs
        return EagerBytes(
            forward=numbers * (forward + 2 * cast + 2 * size),
            backward=numbers * (backward + 2 * cast),
            calls_forward=2 * (calls[0] + 2 * narrow + 1),
            calls_backward=2 * (calls[1] + 2 * narrow),
        )
    more = (2 * W + size, 3 * W + cast) if residual else (0.0, 0.0)
    return EagerBytes(
        forward=numbers * (forward + cast + more[0]),
        backward=numbers * (backward + cast + more[1]),
        calls_forward=calls[0] + narrow + residual,
        calls_backward=calls[1] + narrow + residual * (1 + narrow),
    )


def _elementwise(config: ModelConfig, op: Op, size: float) -> EagerBytes:
    numbers = op.bytes_written / size
    if op.name == "rope":
        return _rope(config, numbers, size)
    if op.name.endswith(".act"):
        return _activation(config, numbers, size, gated=op.bytes_read > 1.5 * op.bytes_written)
    return EagerBytes(forward=3 * size * numbers, backward=0.0, calls_forward=1)  # a sum's gradient goes to both sides


def _rope(config: ModelConfig, numbers: float, size: float) -> EagerBytes:
    """Queries and keys separately: four multiplications of halves, a difference, a sum and a concatenation."""
    cast = W + size if size < W else 0.0
    casts = 4 * (cast > 0)
    return EagerBytes(
        forward=numbers * (9.5 * W + 2 * cast),
        backward=numbers * ((14.5 if config.rope.interleaved else 10.5) * W + 2 * cast),
        calls_forward=14 + casts,
        calls_backward=2 * (10 if config.rope.interleaved else 8) + casts,
    )


def _activation(config: ModelConfig, numbers: float, size: float, *, gated: bool) -> EagerBytes:
    """Gate and up alternate, so both are copied out first; the backward pass interleaves them again."""
    forward, backward, calls = {"relu2": (4, 10, (2, 4)), "swiglu_clamped": (15, 25, (7, 9))}.get(
        config.activation, (2, 3, (1, 1))
    )
    if gated:
        forward, backward, calls = forward + 7, backward + 10, (calls[0] + 3, calls[1] + 3)
    return EagerBytes(
        forward=numbers * forward * size,
        backward=numbers * backward * size,
        calls_forward=calls[0],
        calls_backward=calls[1],
    )


def _loss(config: ModelConfig, op: Op, size: float) -> EagerBytes:
    """Logits widened, log-softmax, gather of the targets; backward: zeros with one entry per row, then the softmax."""
    numbers, cast = op.flops / 4, W + size if size < W else 0.0
    return EagerBytes(
        forward=numbers * (3 * W + cast),
        backward=numbers * (5 * W + cast),
        calls_forward=2 + (cast > 0),
        calls_backward=2 + (cast > 0),
    )


def _embedding(config: ModelConfig, op: Op, size: float) -> EagerBytes:
    """Rows in fp32; the backward pass adds their gradients into a zeroed table of the vocabulary's size."""
    rows = op.bytes_written / size * W
    return EagerBytes(
        forward=2 * rows, backward=rows + W * config.vocab * config.hidden, calls_forward=1, calls_backward=1
    )


_KINDS = {
    "matmul": _matmul,
    "attention": lambda config, op, size: EagerBytes(),
    "norm": _norm,
    "elementwise": _elementwise,
    "loss": _loss,
    "embedding": _embedding,
}
