"""Expanded latent attention on a GPU: gather the rows of all sequences, multiply them by the up-projection (cuBLAS),
and attend to the keys and values, for as many heads at a time as fit a workspace.

Launches depend on shapes and on `num_keys` only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, first_fitting, is_bare, on, power_of_two
from armillary.kernels.latent.expanded_kernels_triton import gather, prefill
from armillary.kernels.paged.paged_attention import PagedBatch

_WORKSPACE_BYTES = 1 << 29  # of expanded keys and values; heads are computed in groups where there are more
_GATHERED = 16  # rows per program

# bytes per number -> (queries, keys, warps, stages, KB of shared memory that it compiles to at most), best first
_TILES = {
    2: ((128, 64, 8, 3, 164), (128, 64, 8, 2, 129), (64, 32, 4, 2, 69)),
    4: ((32, 32, 4, 2, 113), (32, 16, 4, 1, 73)),
}


def latent_prefill(
    q_TNP: Tensor,
    q_TNR: Tensor,
    cache: Tensor,
    up_NUC: Tensor,
    batch: PagedBatch,
    scale: float,
    num_keys: int | None = None,
) -> Tensor:
    """See `armillary.kernels.latent.latent_prefill.latent_prefill`."""
    num_keys = int(batch.lengths_B.sum()) if num_keys is None else num_keys
    return (_launched if is_bare(q_TNP) else _latent_prefill)(
        q_TNP, q_TNR, cache, up_NUC, batch.tables_BP, batch.starts, batch.lengths_B, scale, num_keys
    )


def _launched(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    up: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    num_keys: int,
) -> Tensor:
    (tokens, heads, _), (_, per_head, rank), num_rows = q.shape, up.shape, tables.shape[0]
    out = torch.zeros(tokens, heads, per_head - q.shape[2], dtype=q.dtype, device=q.device)
    if not num_rows or not num_keys or not q.numel():
        return out
    q, q_rope, cache, tables = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, q_rope, cache, tables))
    if scale <= 0:  # kernels take the maximum before they multiply by the scale
        q, q_rope, scale = (-q, -q_rope, -scale) if scale < 0 else (q * 0.0, q_rope * 0.0, 1.0)
    starts, lengths = starts.contiguous(), lengths.contiguous()
    at_once = max(1, _WORKSPACE_BYTES // (num_keys * per_head * q.element_size()))
    with on(q):
        rows = _gathered(cache, tables, lengths, num_keys)
        for some in (slice(first, first + at_once) for first in range(0, heads, at_once)):
            kv = F.linear(rows[:, :rank], up[some].flatten(0, 1).to(rows.dtype)).unflatten(1, (-1, per_head))
            _attend(q[:, some], q_rope[:, some], kv, rows[:, rank:], starts, lengths, out[:, some], scale)
    return out


_latent_prefill = torch.library.custom_op("armillary::latent_prefill", _launched, mutates_args=())


@_latent_prefill.register_fake
def _(q, q_rope, cache, up, tables, starts, lengths, scale, num_keys):
    return q.new_empty(*q.shape[:2], up.shape[1] - q.shape[2])


def _gathered(cache: Tensor, tables: Tensor, lengths: Tensor, num_keys: int) -> Tensor:
    """[keys, C + R]: the rows of all sequences, one after the other; anything behind them."""
    width, num_rows = cache.shape[2], tables.shape[0]
    rows = torch.empty(num_keys, width, dtype=cache.dtype, device=cache.device)
    gather[(ceil_div(num_keys, _GATHERED),)](
        cache,
        tables,
        lengths,
        rows,
        num_rows,
        *cache.stride()[:2],
        tables.stride(0),
        E=width,
        E_PAD=power_of_two(width),
        PAGE=cache.shape[1],
        ROWS=_searched(num_rows),
        N=_GATHERED,
        num_warps=4,
    )
    return rows


def _searched(num_rows: int) -> int:
    """Sequences that a program searches to find its own; few sizes, as each is compiled separately."""
    return 32 if num_rows <= 32 else max(256, power_of_two(num_rows))


def _attend(q, q_rope, kv, ropes, starts, lengths, out, scale):
    (tokens, heads, nope_dim), num_rows = q.shape, lengths.shape[0]
    m, n, warps, stages, _ = first_fitting(q.device, _TILES[q.element_size()], lambda tile: tile[4] << 10)
    num_tiles = tokens // m + num_rows
    prefill[(num_tiles * heads,)](
        q,
        q_rope,
        kv,
        ropes,
        starts,
        lengths,
        out,
        scale,
        num_rows,
        num_tiles,
        *q.stride()[:2],
        *q_rope.stride()[:2],
        *kv.stride()[:2],
        ropes.stride(0),
        *out.stride()[:2],
        P=nope_dim,
        P_PAD=max(16, power_of_two(nope_dim)),
        R=q_rope.shape[2],
        R_PAD=max(16, power_of_two(q_rope.shape[2])),
        V=out.shape[2],
        V_PAD=max(16, power_of_two(out.shape[2])),
        M=m,
        N=n,
        ROWS=_searched(num_rows),
        PRECISION="tf32x3",  # for fp32: three MMAs that keep its precision
        num_warps=warps,
        num_stages=stages,
    )
