"""Attention for training: causal, grouped heads, packed documents, sliding windows, block-sparse masks.

Every version takes q [B, T, N, D] and k, v [B, S, K, D] (N a multiple of K) and returns [B, T, N, D]. A query at t sees
the keys up to t + S - T; a query that sees no key gives zeros.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, LazyFunction, Op, OpWork, Version, compiled, in_triton

# B batch, T queries, S keys, N query heads, K KV heads, D head dim, X and Y blocks of queries and keys

BLOCK = 128  # queries and keys per entry of a block-sparse mask
_MOST_SCORES_BYTES = 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOptions:
    """What a layer and a batch ask of attention."""

    documents_BT: Tensor | None = None  # queries see keys with the same document number only
    blocks_XY: Tensor | None = None  # boolean mask over blocks of 128 × 128
    sinks_N: Tensor | None = None  # one logit per head that takes part in the softmax and contributes no value
    slopes_N: Tensor | None = None  # ALiBi: score += slope · (key position - query position)
    scale: float | None = None  # of the scores; None: 1/√D
    window: int = 0  # keys that a query sees, itself included; 0: all
    chunk: int = 0  # queries see keys of the same chunk of so many positions only; 0: all
    pair_windows: tuple[int, int] = (
        0,
        0,
    )  # of first and second keys of 2-simplicial attention; (0, 0): none
    softcap: float = 0.0  # c·tanh(x/c) on the scores; 0: none
    causal: bool = True  # whether keys after a query are hidden from it
    scales_2K: Tensor | None = None  # factors of the keys and values of a quantised paged cache

    @property
    def is_plain(self) -> bool:
        """Nothing but a scaled softmax over a mask."""
        return not self.softcap and self.sinks_N is None and self.slopes_N is None

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = AttentionOptions()


def reference(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """Scores are materialised; softmax in at least fp32."""
    group = q_BTND.shape[2] // k_BSKD.shape[2]
    k_BSND, v_BSND = k_BSKD.repeat_interleave(group, dim=2), v_BSKD.repeat_interleave(group, dim=2)
    scores = widen(torch.einsum("btnd,bsnd->bnts", q_BTND, k_BSND)) * options.scale_for(q_BTND.shape[-1])
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance_TS = distances(q_BTND.shape[1], k_BSKD.shape[1], q_BTND.device)
    if options.slopes_N is not None:
        scores = scores - options.slopes_N.to(scores.dtype)[:, None, None] * distance_TS
    seen = seen_keys(distance_TS, options)
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.sinks_N is not None:
        sink = options.sinks_N.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    # a row without keys would be NaN: it is replaced before the softmax and zeroed after it
    weights = scores.masked_fill(~(scores != -torch.inf).any(-1, keepdim=True), 0.0).softmax(-1)
    weights = weights[..., : k_BSKD.shape[1]].masked_fill(~seen, 0.0)
    return torch.einsum("bnts,bsnd->btnd", weights.to(v_BSND.dtype), v_BSND)


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[T, S]: query position minus key position."""
    query = torch.arange(num_queries, device=device) + num_keys - num_queries
    return query[:, None] - torch.arange(num_keys, device=device)


def seen_keys(distance_TS: Tensor, options: AttentionOptions) -> Tensor:
    """Boolean mask that broadcasts to [B, N, T, S]."""
    seen = distance_TS >= 0 if options.causal else torch.ones_like(distance_TS, dtype=torch.bool)
    if options.window:
        seen = seen & (distance_TS < options.window)
    if options.chunk:
        query_T1 = distance_TS[:, :1]  # the first key is at position 0
        seen = seen & (query_T1 // options.chunk == (query_T1 - distance_TS) // options.chunk)
    if options.blocks_XY is not None:
        T, S = distance_TS.shape
        dense_mask = options.blocks_XY.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        seen = seen & dense_mask[:T, :S]
    documents_BT = options.documents_BT
    return seen if documents_BT is None else seen & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])


def in_chunks(documents_BT: Tensor | None, chunk: int, batch: int, length: int, device: torch.device) -> Tensor:
    """Document numbers [B, T] with which every version has chunked attention: each document is split into chunks,
    counted from its first token."""
    index_T = torch.arange(length, device=device)
    if documents_BT is None:
        return (index_T // chunk).expand(batch, -1)
    begins_BT = F.pad(documents_BT.diff(dim=1) != 0, (1, 0), value=True)
    first_BT = torch.where(begins_BT, index_T, 0).cummax(dim=1).values
    return documents_BT * (length // chunk + 1) + (index_T - first_BT) // chunk


def sdpa(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """By the kernel that torch chooses, with a dense mask where the causal flag is not enough."""
    if not options.is_plain:
        return reference(q_BTND, k_BSKD, v_BSKD, options)
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKD))
    T, S = q.shape[2], k.shape[2]
    limited = 0 < options.window < S or 0 < options.chunk < S
    free = options.documents_BT is None and options.blocks_XY is None and not limited
    plain = free and (T == S or not options.causal)
    mask = None if plain else seen_keys(distances(T, S, q.device), options)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=plain and options.causal,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


def sdpa_by(
    backend: SDPBackend, q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, options: AttentionOptions = PLAIN
) -> Tensor:
    """`sdpa` by this backend only."""
    with sdpa_kernel(backend):
        return sdpa(q_BTND, k_BSKD, v_BSKD, options)


cudnn, flash = partial(sdpa_by, SDPBackend.CUDNN_ATTENTION), partial(sdpa_by, SDPBackend.FLASH_ATTENTION)


# --- the op


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """Causal self-attention over whole sequences."""

    batch: int
    length: int  # tokens per row
    heads: int
    kv_heads: int
    head_dim: int = 128
    documents: int = 0  # documents of equal length per row; 0: no document numbers
    window: int = 0  # keys that a query sees; 0: all before it
    sparse: bool = False  # only blocks near the diagonal and every eighth column of blocks
    softcap: float = 0.0  # 0: none
    sinks: bool = False


def sparse_blocks(length: int, device: torch.device | str) -> Tensor:
    """The block-sparse pattern of the cases: four blocks along the diagonal, and every eighth column."""
    index = torch.arange(-(-length // BLOCK), device=device)
    return ((index[:, None] - index).abs() < 4) | (index % 8 == 0)


def inputs(case: AttentionCase, generator: torch.Generator) -> tuple[object, ...]:
    normal = partial(case.normal, generator)
    shape, kv_shape = ((case.batch, case.length, heads, case.head_dim) for heads in (case.heads, case.kv_heads))
    documents = None
    if case.documents:
        index = torch.arange(case.length, device=generator.device)
        documents = (index * case.documents // case.length).expand(case.batch, -1).contiguous()
    blocks = sparse_blocks(case.length, generator.device) if case.sparse else None
    sinks = normal(case.heads) if case.sinks else None
    options = AttentionOptions(
        documents_BT=documents, blocks_XY=blocks, sinks_N=sinks, window=case.window, softcap=case.softcap
    )
    return normal(*shape), normal(*kv_shape), normal(*kv_shape), options


def num_pairs(case: AttentionCase) -> int:
    """Visible query-key pairs per row."""
    size = case.length / max(1, case.documents)
    earlier = (t - int(int(t / size) * size) + 1 for t in range(case.length))
    visible = sum(min(keys, case.window or keys) for keys in earlier)
    if not case.sparse:
        return visible
    blocks = sparse_blocks(case.length, "cpu").tril()
    return int(visible * float(blocks.sum()) / float(torch.ones_like(blocks).tril().sum()))


def work(case: AttentionCase) -> OpWork:
    """4·D FLOPs per pair and head forward, 2.5 times that backward (five GEMMs instead of two); q, k, v and the result
    are moved."""
    flops = 4.0 * case.head_dim * case.heads * case.batch * num_pairs(case)
    moved = case.torch_dtype.itemsize * 2.0 * case.batch * case.length * case.head_dim * (case.heads + case.kv_heads)
    return OpWork(flops=flops, bytes=moved, backward_flops=2.5 * flops, backward_bytes=2.5 * moved, ceiling="gemm")


def _not_plain(case: AttentionCase) -> str | None:
    if case.documents or case.window or case.sparse or case.softcap or case.sinks:
        return "it has no documents, windows, block masks, caps or sinks"
    return None if case.dtype in ("bf16", "fp16") else "it is for 16-bit dtypes"


def _not_sdpa(case: AttentionCase) -> str | None:
    return "it has no caps or sinks" if case.softcap or case.sinks else None


def _not_flex(case: AttentionCase) -> str | None:
    if case.sinks:
        return "it has no sinks"
    return "libraries have plain causal attention" if _not_plain(case) is None else None


def _not_written_out(case: AttentionCase) -> str | None:
    scores = _scores_bytes(case)
    return f"it would hold {scores / 1e9:.0f} GB of scores" if scores > _MOST_SCORES_BYTES else None


def _not_own(case: AttentionCase) -> str | None:
    if case.head_dim > 256:
        return "heads are too wide for its registers"
    return "it sums in fp32" if case.dtype == "fp64" else None


def _not_window(case: AttentionCase) -> str | None:
    if (case.window, case.head_dim) != (128, 64) or case.heads % (8 * case.kv_heads):
        return "it is for windows of 128 keys and heads of 64 dims, eight to a KV head"
    if case.documents or case.sparse or case.softcap:
        return "it has no documents, block masks or caps"
    return None if case.dtype in ("bf16", "fp16") else "it is for 16-bit dtypes"


def _small(case: AttentionCase) -> AttentionCase:
    """The same case where the wide reference can hold its scores several times, so that versions compiled ahead fit
    too."""
    if case.device == "cpu":
        return replace(case, batch=1, length=min(case.length, 256))
    return case if _scores_bytes(case) < 5e9 else replace(case, batch=1, length=min(case.length, 1024))


def _scores_bytes(case: AttentionCase) -> float:
    return 4.0 * case.batch * case.heads * case.length**2


def _case(length: int, heads: int, kv_heads: int, batch: int = 1, **more: Any) -> AttentionCase:
    return AttentionCase(batch=batch, length=length, heads=heads, kv_heads=kv_heads, **more)


ATTENTION = Op(
    name="attention",
    reference=reference,
    versions=(
        in_triton("attention.attention_triton", "attention", refuses=_not_own),
        in_triton("attention.attention_triton", "merged_heads", name="triton, merged heads", refuses=_not_own),
        in_triton(
            "attention.window_attention",
            "attention",
            name="triton, narrow window",
            refuses=_not_window,
            needs=("wgmma",),
        ),
        in_triton(
            "attention.window_attention",
            "both_ways",
            name="triton, narrow window both ways",
            refuses=_not_window,
            needs=("wgmma",),
        ),
        Version(name="cudnn", run=cudnn, refuses=_not_plain, needs=("cuda",), deterministic=False),
        Version(name="flash", run=flash, refuses=_not_plain, needs=("cuda",), deterministic=False),
        Version(
            name="flex",
            run=LazyFunction("armillary.kernels.attention.flex", "attention"),
            refuses=_not_flex,
            needs=("compile", "cuda"),
        ),
        Version(name="sdpa", run=sdpa, refuses=_not_sdpa, deterministic=False),
        replace(compiled(reference), refuses=_not_written_out),
    ),
    inputs=inputs,
    work=work,
    grads=(0, 1, 2),
    cases={
        "8k": _case(8192, 32, 32),
        "8k, groups of 4": _case(8192, 32, 8),
        "4k in 4 documents": _case(4096, 32, 8, batch=2, documents=4),
        "4k, window 1024": _case(4096, 32, 8, batch=2, window=1024),
        "4k, block-sparse": _case(4096, 32, 8, batch=2, sparse=True),
        "gpt-oss, sinks": _case(4096, 64, 8, head_dim=64, window=128, sinks=True),
    },
    small=_small,
)
