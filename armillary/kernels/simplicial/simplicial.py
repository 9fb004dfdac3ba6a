"""2-simplicial attention (Roy et al., Fast and Simplex, arXiv 2507.02754): a query attends to pairs of tokens.

logit(i, j, k) = scale · Σ_d q_i · k1_j · k2_k over the pairs i − w1 < j ≤ i and i − w2 < k ≤ i; one softmax over all
pairs; out_i = Σ_jk P · (v1_j ⊙ v2_k). The two keys of a KV head are neighbours in one tensor [B, S, 2·K, D], and so are
its two values, so that caches and shards hold whole heads. The key biases of the paper are left out, as in its kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, Version, compiled, in_triton
from armillary.spec.arithmetic.attention_ops import AttentionShape, simplicial_attention

# B batch, T queries, S keys, K KV heads, N query heads, G query heads per KV head, D head dim, A first keys of a window

_MOST_LOGITS = 1 << 24  # of a block of queries: 64 MB in fp32
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 512


def reference(q_BTND: Tensor, k_BSJD: Tensor, v_BSJD: Tensor, options: AttentionOptions) -> Tensor:
    """Every logit of the first window times all second keys is materialised; softmax in at least fp32. Queries are the
    last T of S tokens; a document is a run of equal numbers in `options.documents_BT` [B, S]."""
    (T, S), (window_1, window_2) = (q_BTND.shape[1], k_BSJD.shape[1]), options.pair_windows
    (k1, k2), (v1, v2) = halves(k_BSJD), halves(v_BSJD)
    q_BTKGD = q_BTND.unflatten(2, (k1.shape[2], -1))
    position_T = torch.arange(S - T, S, device=q_BTND.device)
    first_TA = position_T[:, None] - torch.arange(min(window_1, S), device=q_BTND.device)
    near = first_TA.clamp_min(0)
    q_k1 = q_BTKGD[:, :, None] * k1[:, near][:, :, :, :, None]
    logits = widen(torch.einsum("btakgd,bskd->btkgas", q_k1, k2)) * options.scale_for(q_BTND.shape[-1])
    second_TS = torch.arange(S, device=q_BTND.device) - position_T[:, None]
    seen_2 = (second_TS <= 0) & (second_TS > -window_2)
    begins_BT = None if options.documents_BT is None else run_begins(options.documents_BT)[:, S - T :]
    seen_1 = first_TA >= (0 if begins_BT is None else begins_BT[:, :, None])
    seen = seen_1[..., :, None] & seen_2[:, None, :]
    if begins_BT is not None:
        seen = seen & (torch.arange(S, device=q_BTND.device) >= begins_BT[:, :, None, None])
    seen = seen.expand(len(q_BTND), *seen.shape[-3:])[:, :, None, None]
    weights = logits.masked_fill(~seen, -torch.inf).flatten(-2).softmax(-1).view_as(logits)
    mixed_BTAKGD = torch.einsum("btkgas,bskd->btakgd", weights.to(v2.dtype), v2)
    return (mixed_BTAKGD * v1[:, near][:, :, :, :, None]).sum(2).flatten(2, 3)


def halves(x_BSJD: Tensor) -> tuple[Tensor, Tensor]:
    """First and second keys, or values: [B, S, K, D] each."""
    return x_BSJD[..., 0::2, :], x_BSJD[..., 1::2, :]


def run_begins(documents_BT: Tensor) -> Tensor:
    """[B, T]: where the document of a token begins."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = F.pad(documents_BT.diff(dim=1) != 0, (1, 0), value=True)
    return torch.where(begins_BT, index_T, 0).cummax(dim=1).values


def by_blocks(q_BTND: Tensor, k_BSJD: Tensor, v_BSJD: Tensor, options: AttentionOptions) -> Tensor:
    """The reference for a block of queries and the keys of its windows at a time; the backward pass computes a block
    again, so that no more than one is in memory."""
    block = partial(_block, q_BTND, k_BSJD, v_BSJD, options)
    run: Any = block
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BTND, k_BSJD, v_BSJD)):
        run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    outs = [run(begin, end) for begin, end in _blocks(q_BTND, options)]
    return torch.cat(outs, dim=1) if outs else torch.zeros_like(q_BTND)


def _blocks(q_BTND: Tensor, options: AttentionOptions) -> Iterator[tuple[int, int]]:
    B, T, N, _ = q_BTND.shape
    rows = B * N * options.pair_windows[0] * (max(options.pair_windows) + _SMALLEST_BLOCK)
    size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, _MOST_LOGITS // rows))
    return ((begin, min(T, begin + size)) for begin in range(0, T, size))


def _block(q_BTND: Tensor, k_BSJD: Tensor, v_BSJD: Tensor, options: AttentionOptions, begin: int, end: int) -> Tensor:
    shift = k_BSJD.shape[1] - q_BTND.shape[1]
    keys = slice(max(0, begin + shift - max(options.pair_windows) + 1), end + shift)
    documents = None if options.documents_BT is None else options.documents_BT[:, keys]
    own = AttentionOptions(documents_BT=documents, scale=options.scale, pair_windows=options.pair_windows)
    return reference(q_BTND[:, begin:end], k_BSJD[:, keys], v_BSJD[:, keys], own)


# --- the op


@dataclass(frozen=True, kw_only=True)
class SimplicialCase(Case):
    """Causal 2-simplicial self-attention over whole sequences."""

    batch: int
    length: int  # tokens per row
    heads: int
    kv_heads: int = 1
    head_dim: int = 128
    window_1: int = 32
    window_2: int = 512
    documents: int = 0  # documents of equal length per row; 0: no document numbers


LOGITS_STD = 4.0
"""of the cases: a softmax that is neither flat nor one-hot, where errors in logits show"""


def _inputs(case: SimplicialCase, generator: torch.Generator) -> tuple[Any, ...]:
    """Products of three normal numbers have a variance of 1, so logits one of scale² · D before queries are widened."""
    shape, kv_shape = ((case.batch, case.length, heads, case.head_dim) for heads in (case.heads, 2 * case.kv_heads))
    documents = None
    if case.documents:
        index = torch.arange(case.length, device=generator.device)
        documents = (index * case.documents // case.length).expand(case.batch, -1).contiguous()
    options = AttentionOptions(documents_BT=documents, pair_windows=(case.window_1, case.window_2))
    normal = partial(case.normal, generator)
    return normal(*shape) * LOGITS_STD, normal(*kv_shape), normal(*kv_shape), options


def _work(case: SimplicialCase) -> OpWork:
    """Exact: pairs of every query, ramps at the start of a document included; forward 2 GEMMs, backward 6."""
    shape = AttentionShape(heads=case.heads, kv_heads=case.kv_heads, qk_dim=case.head_dim, v_dim=case.head_dim)
    spans = [(length, length) for length in _lengths(case)] * case.batch
    sizes: dict[str, Any] = {"window_1": case.window_1, "window_2": case.window_2, "dtype": case.dtype}
    forward, backward = (
        simplicial_attention("simplicial", shape, spans, **sizes, backward=back) for back in (False, True)
    )
    return OpWork.of(forward, backward, ceiling="gemm")


def _lengths(case: SimplicialCase) -> list[int]:
    count = max(1, case.documents)
    bounds = [-(-i * case.length // count) for i in range(count + 1)]
    return [end - begin for begin, end in pairwise(bounds) if end > begin]


def _not_own(case: SimplicialCase) -> str | None:
    if case.head_dim > 128:
        return "heads are too wide for its registers"
    return "it sums in fp32" if case.dtype == "fp64" else None


def _not_hopper(case: SimplicialCase) -> str | None:
    if case.head_dim != 128 or case.heads != 128 * case.kv_heads:
        return "it is for 128 heads of 128 dims per KV head"
    return None if case.dtype in ("bf16", "fp16") else "it is for 16-bit dtypes"


def _not_whole(case: SimplicialCase) -> str | None:
    logits = 4.0 * case.batch * case.heads * case.length**2 * case.window_1
    return f"it would hold {logits / 1e9:.0f} GB of logits" if logits > 1e9 else None


_SMALL_LOGITS = 1 << 28


def _small(case: SimplicialCase) -> SimplicialCase:
    """Fewer heads and tokens, so that the wide reference fits: the longest sequence whose logits do, but no shorter
    than what passes a small first window."""
    heads = case.heads if case.device != "cpu" else max(1, min(case.heads, 4 * case.kv_heads))
    length = int((_SMALL_LOGITS / (heads * case.window_1)) ** 0.5)
    length = min(case.length, max(64, length if case.device != "cpu" else 64))
    return replace(case, batch=1, heads=heads, length=length)


_PUBLISHED: dict[str, Any] = {"batch": 4, "length": 8192, "window_1": 32}
"""the shapes that the authors of the paper measure"""

SIMPLICIAL = Op(
    name="simplicial",
    reference=reference,
    versions=(
        in_triton(
            "simplicial.simplicial_triton",
            "on_hopper",
            name="triton, Hopper",
            refuses=_not_hopper,
            needs=("wgmma",),
        ),
        in_triton("simplicial.simplicial_triton", "simplicial", refuses=_not_own),
        Version(name="blocks", run=by_blocks),
        replace(compiled(reference), refuses=_not_whole),
    ),
    inputs=_inputs,
    work=_work,
    grads=(0, 1, 2),
    cases={
        "8k, 128 heads, 32 × 512": SimplicialCase(heads=128, window_2=512, **_PUBLISHED),
        "8k, 64 heads, 32 × 512": SimplicialCase(heads=64, window_2=512, **_PUBLISHED),
        "8k, 128 heads, 32 × 256": SimplicialCase(heads=128, window_2=256, **_PUBLISHED),
        "4k, groups of 4, 16 × 256": SimplicialCase(
            batch=2, length=4096, heads=32, kv_heads=8, window_1=16, window_2=256
        ),
        "4k in 4 documents": SimplicialCase(batch=2, length=4096, heads=32, kv_heads=8, documents=4, window_1=16),
    },
    small=_small,
)
