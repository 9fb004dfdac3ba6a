"""FLOPs and bytes of gated delta-net layers beside their projections (arXiv 2412.06464, section 3.3).

A value head's state is a matrix [D, E] in fp32, whatever the length of the sequence.
"""

from armillary.spec.arithmetic.ops import FP32_BYTES, Op, size_of
from armillary.spec.model import GatedDelta

CHUNK = 64
"""tokens that are computed together (kernels.delta.gated_delta.CHUNK)"""


def delta_rule(name: str, delta: GatedDelta, *, tokens: int, sequences: int, dtype: str, backward: bool = False) -> Op:
    """Chunked form, per token and value head: k·kᵀ, q·kᵀ and scores·u over the chunk (L·(4·D + 2·E)), the triangular
    solve (L·(D + E)), and three products with the state (6·D·E). The backward pass has each product twice and the
    forward's once more: three times the FLOPs. q, k, v, gates and outputs are moved once, states once per sequence."""
    d, e = delta.key_dim, delta.value_dim
    flops = tokens * delta.value_heads * (CHUNK * (5 * d + 3 * e) + 6 * d * e)
    inputs = tokens * (delta.channels + 2 * delta.value_heads) * size_of(dtype)
    outputs = tokens * delta.value_heads * e * size_of(dtype)
    states = sequences * delta.value_heads * d * e * FP32_BYTES
    if backward:
        flops, inputs, outputs = 3 * flops, inputs + 2 * outputs, inputs
    return Op(
        name=name,
        kind="attention",
        flops=flops,
        bytes_read=inputs + states,
        bytes_written=outputs + states,
        dtype=dtype,
    )


def delta_decode(name: str, delta: GatedDelta, *, sequences: int, dtype: str) -> Op:
    """One token of each sequence: the state is read, decayed, corrected and read out (7·D·E FLOPs), and written."""
    d, e = delta.key_dim, delta.value_dim
    states = sequences * delta.value_heads * d * e
    moved = sequences * (delta.channels + 2 * delta.value_heads) * size_of(dtype)
    return Op(
        name=name,
        kind="elementwise",
        flops=7 * states,
        bytes_read=states * FP32_BYTES + moved,
        bytes_written=states * FP32_BYTES + sequences * delta.value_heads * e * size_of(dtype),
        dtype=dtype,
    )


def causal_conv(name: str, *, tokens: int, channels: int, width: int, dtype: str, backward: bool = False) -> Op:
    """Depthwise over the last `width` tokens, and SiLU: 2·width + 4 FLOPs per element; three times that backward."""
    elements = tokens * channels
    return Op(
        name=name,
        kind="elementwise",
        flops=elements * (2 * width + 4) * (3 if backward else 1),
        bytes_read=elements * size_of(dtype) * (2 if backward else 1),
        bytes_written=elements * size_of(dtype),
        dtype=dtype,
    )
