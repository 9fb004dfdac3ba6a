"""FLOPs and bytes of attention: how many (query, key) pairs a mask leaves, and what they cost.

A span is (queries, keys): the queries are the last of the keys, so (T, T) is a training sequence, (1, C) a
decode step over a cache of C - 1 tokens plus itself, (c, past + c) a prefill chunk.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from armillary.spec.arithmetic.ops import FP32_BYTES, Op, size_of

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads, dims and mask of one attention layer; the dims of value heads differ in MLA. A `window` is the most keys
    per query, itself included; with a `chunk`, a query attends only to keys of its own chunk."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    latent: bool = False
    """keys and values are one cached latent of size qk_dim, its first v_dim elements the value (absorbed MLA)"""


def self_spans(lengths: Iterable[int]) -> list[Span]:
    """One span per sequence of a packed (varlen) batch."""
    return [(length, length) for length in lengths]


def attended_pairs(span: Span, shape: AttentionShape, *, half: bool = False) -> float:
    """(query, key) pairs that the mask leaves, exactly; with `half`, the diagonal counts half: T²/2 for a causal
    sequence instead of T·(T+1)/2. That is the MFU convention (causal attention counted as half)."""
    queries, keys = span
    return _seen(keys, shape, half) - _seen(keys - queries, shape, half) if shape.causal else queries * keys


def _seen(n: int, shape: AttentionShape, half: bool) -> float:
    """Pairs of the first n positions of a causal sequence."""
    if shape.chunk:
        chunks, rest = divmod(n, shape.chunk)
        return chunks * _triangle(shape.chunk, half) + _triangle(rest, half)
    if shape.window and n > shape.window:
        return _triangle(shape.window, half) + (n - shape.window) * shape.window
    return _triangle(n, half)


def _triangle(n: int, half: bool) -> float:
    return n * n / 2 if half else n * (n + 1) // 2


def keys_read(span: Span, shape: AttentionShape) -> int:
    """Keys that at least one query of the span attends to: what must be read from memory."""
    queries, keys = span
    first = keys - queries
    if shape.chunk:
        return keys - first // shape.chunk * shape.chunk
    return min(keys, queries + shape.window - 1) if shape.window else keys


def attention(
    name: str,
    shape: AttentionShape,
    spans: Sequence[Span],
    *,
    dtype: str,
    kv_dtype: str = "",
    flash: bool = True,
    half: bool = False,
) -> Op:
    """softmax(QKᵀ)V: 2·heads·(qk_dim + v_dim)·pairs FLOPs, the two GEMMs only (softmax not counted, as in
    Dao et al., FlashAttention, arXiv 2205.14135). `flash`: masked blocks are skipped and scores never leave the
    chip; otherwise the full matrix is computed, and the scores and probabilities are each written and read."""
    seen = sum(attended_pairs(span, shape, half=half) for span in spans) if flash else _matrix(spans)
    flops = 2 * shape.heads * (shape.qk_dim + shape.v_dim) * seen
    queries, b = sum(q for q, _ in spans), size_of(dtype)
    scores = 0 if flash else 2 * shape.heads * _matrix(spans) * b
    read = queries * shape.heads * shape.qk_dim * b + _kv_bytes(shape, spans, kv_dtype or dtype) + scores
    written = queries * shape.heads * (shape.v_dim * b + FP32_BYTES) + scores
    return Op(name=name, kind="attention", flops=flops, bytes_read=read, bytes_written=written, dtype=dtype)


def attention_backward(
    name: str, shape: AttentionShape, spans: Sequence[Span], *, dtype: str, flash: bool = True, half: bool = False
) -> Op:
    """dV = PᵀdO, dP = dO·Vᵀ, dQ = dS·K, dK = dSᵀQ, and with `flash` S = QKᵀ once more, so 5 GEMMs against the
    forward's 2: 2.5 × its FLOPs where qk_dim = v_dim (Dao, FlashAttention-2, arXiv 2307.08691, section 4.1)."""
    seen = sum(attended_pairs(span, shape, half=half) for span in spans) if flash else _matrix(spans)
    flops = 2 * shape.heads * ((3 if flash else 2) * shape.qk_dim + 2 * shape.v_dim) * seen
    queries, b = sum(q for q, _ in spans), size_of(dtype)
    scores = 0 if flash else 2 * shape.heads * _matrix(spans) * b
    kv = _kv_bytes(shape, spans, dtype)
    q, out = queries * shape.heads * shape.qk_dim * b, queries * shape.heads * shape.v_dim * b
    read = q + kv + 2 * out + queries * shape.heads * FP32_BYTES + scores
    return Op(name=name, kind="attention", flops=flops, bytes_read=read, bytes_written=q + kv + scores, dtype=dtype)


def _matrix(spans: Sequence[Span]) -> int:
    return sum(q * k for q, k in spans)


def _kv_bytes(shape: AttentionShape, spans: Sequence[Span], dtype: str) -> float:
    each = shape.qk_dim if shape.latent else shape.qk_dim + shape.v_dim
    return sum(keys_read(span, shape) for span in spans) * shape.kv_heads * each * size_of(dtype)


# --- 2-simplicial attention


def triples(span: Span, window_1: int, window_2: int) -> int:
    """Σ over queries of min(p+1, window_1) · min(p+1, window_2), p the query's position: exact, ramps included."""
    queries, keys = span
    return _triples(keys, window_1, window_2) - _triples(keys - queries, window_1, window_2)


def _triples(n: int, window_1: int, window_2: int) -> int:
    a, b = sorted((window_1, window_2))
    ramp = min(n, a)
    total = ramp * (ramp + 1) * (2 * ramp + 1) // 6
    if n > a:
        middle = min(n, b)
        total += a * (middle * (middle + 1) - a * (a + 1)) // 2
    return total + a * b * max(0, n - b)


def simplicial_attention(
    name: str,
    shape: AttentionShape,
    spans: Sequence[Span],
    *,
    window_1: int,
    window_2: int,
    dtype: str,
    backward: bool = False,
) -> Op:
    """softmax over pairs (j, k) of Σ_d q·k1_j·k2_k, then Σ P·(v1_j ⊙ v2_k). Forward (q⊙k1)K2ᵀ, P·V2: 4·heads·dim
    FLOPs per triple. Backward S and P·V2 once more, dP, dV2, d(q⊙k1), dK2: 12. Multiplications with k1 and v1 happen
    once per pair and are not counted (Roy et al., Fast and Simplex, arXiv 2507.02754)."""
    seen = sum(triples(span, window_1, window_2) for span in spans)
    flops = (12 if backward else 4) * shape.heads * shape.qk_dim * seen
    queries, b = sum(q for q, _ in spans), size_of(dtype)
    q = queries * shape.heads * shape.qk_dim * b
    rows = sum(min(k, n + window - 1) for n, k in spans for window in (window_1, window_2))
    kv = 2 * rows * shape.kv_heads * shape.qk_dim * b
    stats = queries * shape.heads * FP32_BYTES
    read = 3 * q + kv + stats if backward else q + kv
    written = q + kv if backward else q + stats
    return Op(name=name, kind="attention", flops=flops, bytes_read=read, bytes_written=written, dtype=dtype)
