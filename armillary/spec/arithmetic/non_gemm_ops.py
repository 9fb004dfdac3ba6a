"""FLOPs and bytes of the operations around the GEMMs: norms, rope, activations, embedding, loss, optimizer, routing,
sampling, collectives. Nearly all of them are memory-bound, so the bytes count.
"""

from typing import Literal

from armillary.spec.arithmetic.ops import FP32_BYTES, INDEX_BYTES, Op, size_of
from armillary.spec.model import Activation

ACTIVATION_FLOPS: dict[Activation, int] = {
    "silu": 4,
    "gelu": 5,
    "gelu_tanh": 9,
    "relu": 1,
    "relu2": 2,
    "swiglu_clamped": 8,
}
"""operations per element; exp, erf, tanh and a clamp count as one each"""
NORM_FLOPS = {"rms": 4, "layer": 7}
"""operations per element of a norm"""


def norm(
    name: str, rows: int, columns: int, *, dtype: str, kind: Literal["rms", "layer"] = "rms", residual: bool = False
) -> Op:
    """RMSNorm x·rsqrt(mean(x²) + ε)·w: 4 FLOPs per element (Zhang & Sennrich, arXiv 1910.07467); LayerNorm also
    subtracts the mean and adds a bias: 7 (Ba et al., arXiv 1607.06450). With `residual`, x + residual is formed in
    the same pass and written too: one add, one read and one write more."""
    n, b = rows * columns, size_of(dtype)
    weights = columns * b * (1 if kind == "rms" else 2)
    return Op(
        name=name,
        kind="norm",
        flops=(NORM_FLOPS[kind] + residual) * n,
        bytes_read=(1 + residual) * n * b + weights,
        bytes_written=(1 + residual) * n * b,
        dtype=dtype,
    )


def norm_backward(
    name: str, rows: int, columns: int, *, dtype: str, kind: Literal["rms", "layer"] = "rms", residual: bool = False
) -> Op:
    """dx = r·(w·dy − x̂·mean(w·dy·x̂)) and dw = Σ dy·x̂: 9 FLOPs per element for RMSNorm, 13 for LayerNorm. Reads dy
    and x (and the gradient that came along the residual), writes dx; dw is summed in fp32."""
    n, b = rows * columns, size_of(dtype)
    weights = 1 if kind == "rms" else 2
    return Op(
        name=name,
        kind="norm",
        flops=({"rms": 9, "layer": 13}[kind] + residual) * n,
        bytes_read=(2 + residual) * n * b + columns * b + rows * weights * FP32_BYTES,
        bytes_written=n * b + weights * columns * FP32_BYTES,
        dtype=dtype,
    )


def rope(name: str, tokens: int, heads: int, rotary_dim: int, *, dtype: str) -> Op:
    """Rotate pairs: 4 multiplies and 2 adds per pair, 3 FLOPs per element, over query and key heads together (Su et
    al., arXiv 2104.09864); cos and sin in fp32 are read once per token. The backward is the rotation by −θ."""
    n, b = tokens * heads * rotary_dim, size_of(dtype)
    return Op(
        name=name,
        kind="elementwise",
        flops=3 * n,
        bytes_read=n * b + tokens * rotary_dim * FP32_BYTES,
        bytes_written=n * b,
        dtype=dtype,
    )


def activation(
    name: str, tokens: int, ffn: int, *, dtype: str, function: Activation = "silu", gated: bool = True
) -> Op:
    """act(gate)·up (SwiGLU, Shazeer, arXiv 2002.05202) or act(up): reads both halves, writes one."""
    n, b = tokens * ffn, size_of(dtype)
    return Op(
        name=name,
        kind="elementwise",
        flops=(ACTIVATION_FLOPS[function] + gated) * n,
        bytes_read=(1 + gated) * n * b,
        bytes_written=n * b,
        dtype=dtype,
    )


def activation_backward(
    name: str, tokens: int, ffn: int, *, dtype: str, function: Activation = "silu", gated: bool = True
) -> Op:
    """The function and its derivative, and for a gate two more multiplications: reads dy and the inputs, writes
    the gradient of each input."""
    n, b = tokens * ffn, size_of(dtype)
    return Op(
        name=name,
        kind="elementwise",
        flops=(2 * ACTIVATION_FLOPS[function] + 1 + 2 * gated) * n,
        bytes_read=(2 + gated) * n * b,
        bytes_written=(1 + gated) * n * b,
        dtype=dtype,
    )


# --- embedding and loss


def embedding(name: str, tokens: int, hidden: int, *, dtype: str) -> Op:
    """One gathered row per token: no arithmetic, which is why N in 6·N leaves the lookup out."""
    rows = tokens * hidden * size_of(dtype)
    return Op(
        name=name, kind="embedding", flops=0, bytes_read=rows + tokens * INDEX_BYTES, bytes_written=rows, dtype=dtype
    )


def embedding_backward(name: str, tokens: int, hidden: int, vocab: int, *, dtype: str) -> Op:
    """Add each token's gradient to its row: the rows that occur are read and written (at most the vocabulary)."""
    b = size_of(dtype)
    touched = min(tokens, vocab) * hidden * b
    return Op(
        name=name,
        kind="embedding",
        flops=tokens * hidden,
        bytes_read=tokens * (hidden * b + INDEX_BYTES) + touched,
        bytes_written=touched,
        dtype=dtype,
    )


def cross_entropy(name: str, tokens: int, vocab: int, *, dtype: str) -> Op:
    """logsumexp(logits) − logit of the target: max, subtract, exp, add, 4 FLOPs per logit in one online pass."""
    n = tokens * vocab
    return Op(
        name=name,
        kind="loss",
        flops=4 * n,
        bytes_read=n * size_of(dtype) + tokens * INDEX_BYTES,
        bytes_written=2 * tokens * FP32_BYTES,
        dtype=dtype,
    )


def cross_entropy_backward(name: str, tokens: int, vocab: int, *, dtype: str) -> Op:
    """(softmax − one-hot)·dloss: 3 FLOPs per logit, logits read and their gradient written in place."""
    n, b = tokens * vocab, size_of(dtype)
    return Op(
        name=name,
        kind="loss",
        flops=3 * n,
        bytes_read=n * b + tokens * (INDEX_BYTES + 2 * FP32_BYTES),
        bytes_written=n * b,
        dtype=dtype,
    )


def linear_cross_entropy(
    name: str, tokens: int, hidden: int, vocab: int, *, dtype: str, backward: bool = False, recompute: bool = False
) -> Op:
    """Output projection and loss without logits in memory (Wijmans et al., Cut Your Losses, arXiv 2411.09009).
    Forward 2·tokens·hidden·vocab FLOPs; backward (dX and dW) twice that, three times where the logits are
    recomputed. Hidden and weight are read once, dX and dW written once."""
    b, gemms = size_of(dtype), (3 if recompute else 2) if backward else 1
    x, w = tokens * hidden * b, hidden * vocab * b
    return Op(
        name=name,
        kind="matmul",
        flops=2 * gemms * tokens * hidden * vocab,
        bytes_read=x + w + tokens * INDEX_BYTES,
        bytes_written=x + w if backward else 2 * tokens * FP32_BYTES,
        dtype=dtype,
        shape=(1, tokens, vocab, hidden),
    )


# --- optimizers


def adamw(
    name: str, weights: int, *, weight_dtype: str = "fp32", grad_dtype: str = "fp32", state_dtype: str = "fp32"
) -> Op:
    """m, v, bias corrections, step, decay: 15 FLOPs per weight (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2).
    Moments in `state_dtype` and the weight are read and written; below fp32 an fp32 master is updated and the
    working copy only written. fp32 throughout moves 28 bytes per weight, bf16 with fp32 gradients and master 30."""
    state, master = 2 * size_of(state_dtype), size_of("fp32")
    working = size_of(weight_dtype) if weight_dtype not in ("fp32", "tf32") else 0
    return Op(
        name=name,
        kind="optimizer",
        flops=15 * weights,
        bytes_read=weights * (size_of(grad_dtype) + state + master),
        bytes_written=weights * (state + master + working),
        dtype=state_dtype,
    )


def sgd(name: str, weights: int, *, momentum: bool = True, dtype: str = "fp32") -> Op:
    """w − lr·(μ·m + g): 4 FLOPs per weight, 2 without momentum; momentum is one more array read and written."""
    b = size_of(dtype)
    return Op(
        name=name,
        kind="optimizer",
        flops=(4 if momentum else 2) * weights,
        bytes_read=weights * b * (2 + momentum),
        bytes_written=weights * b * (1 + momentum),
        dtype=dtype,
    )


# --- experts


def router(name: str, tokens: int, experts: int, top_k: int, *, dtype: str = "fp32") -> Op:
    """Scores and top-k over the experts, after the router's matmul: softmax (5 FLOPs) and one compare for each of
    the k passes; writes k scores and k indices per token (Shazeer et al., arXiv 1701.06538)."""
    n = tokens * experts
    return Op(
        name=name,
        kind="softmax",
        flops=(5 + top_k) * n,
        bytes_read=n * size_of(dtype),
        bytes_written=tokens * top_k * (FP32_BYTES + INDEX_BYTES),
        dtype=dtype,
    )


def dispatch(name: str, tokens: int, hidden: int, top_k: int, *, dtype: str) -> Op:
    """Copy each token's row to its k experts: read once, written k times. Its backward is `combine`."""
    b = size_of(dtype)
    return Op(
        name=name,
        kind="copy",
        flops=0,
        bytes_read=tokens * (hidden * b + top_k * INDEX_BYTES),
        bytes_written=tokens * top_k * hidden * b,
        dtype=dtype,
    )


def combine(name: str, tokens: int, hidden: int, top_k: int, *, dtype: str) -> Op:
    """Weighted sum of the k experts' rows of each token: one multiply-add per element."""
    b = size_of(dtype)
    return Op(
        name=name,
        kind="elementwise",
        flops=2 * tokens * top_k * hidden,
        bytes_read=tokens * top_k * (hidden * b + FP32_BYTES + INDEX_BYTES),
        bytes_written=tokens * hidden * b,
        dtype=dtype,
    )


# --- serving and communication


def sampling(name: str, rows: int, vocab: int, *, dtype: str = "fp32") -> Op:
    """Temperature (1), softmax (5), threshold for top-k/top-p/min-p (1), Gumbel or inverse draw (1): 8 FLOPs per
    logit, the logits read once, one id written per row."""
    n = rows * vocab
    return Op(
        name=name,
        kind="sampling",
        flops=8 * n,
        bytes_read=n * size_of(dtype),
        bytes_written=rows * INDEX_BYTES,
        dtype=dtype,
    )


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


def wire_factor(collective: Collective, world: int) -> float:
    """Bytes sent per device over the size of the full array: ring all-reduce 2(n−1)/n, all-gather, reduce-scatter and
    all-to-all (n−1)/n (Thakur et al. 2005; nccl-tests calls it the bus-bandwidth factor), broadcast and send 1."""
    if world <= 1:
        return 0.0
    share = (world - 1) / world
    return {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(collective, share)


def collective(name: str, kind: Collective, elements: int, world: int, *, dtype: str) -> Op:
    """What one of `world` devices sends and receives for an array of `elements` (gathered size for all-gather and
    reduce-scatter); a reduction adds once per received element."""
    wire = elements * size_of(dtype) * wire_factor(kind, world)
    adds = elements * (world - 1) / world if kind in ("all_reduce", "reduce_scatter") else 0
    return Op(name=name, kind="collective", flops=adds, bytes_read=wire, bytes_written=wire, dtype=dtype)
