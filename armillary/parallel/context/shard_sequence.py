"""Context parallelism: every row is sharded over the cp ranks, which attend to each other's tokens through a ring.

The ranks replicate the weights as data-parallel ranks do, so gradients are reduced over both. A rank's tokens of a row
and the attention function of the model are all that differs: positions travel with their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.errors import BadLayout
from armillary.kernels.attention.attention import AttentionOptions, in_chunks
from armillary.kernels.core.torch_compat import uncompiled
from armillary.model.layers.attention_forms import Attend
from armillary.model.layers.rope import inverse_frequencies
from armillary.model.transformer import Transformer
from armillary.parallel.context.ring_attention import make_block_mask, pieces, ring_attention
from armillary.parallel.local_tensors import swap_class


@dataclass(frozen=True, kw_only=True)
class Context:
    """This rank among those that share a row."""

    group: str  # torch's name of the process group
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Context:
        return cls(group=group.group_name, size=group.size(), rank=group.rank())

    def shard(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens of full rows: two of 2·cp pieces, from both ends."""
        if x_BT.shape[1] % (2 * self.size):
            raise BadLayout(
                f"cp={self.size} does not divide {x_BT.shape[1]} tokens into {2 * self.size} equal pieces; "
                "try --set layout.cp=1"
            )
        cuts = x_BT.chunk(2 * self.size, dim=1)
        return torch.cat([cuts[piece] for piece in pieces(self.rank, self.size)], dim=1)

    @uncompiled
    def unshard(self, x_BT: Tensor) -> Tensor:
        """Full rows, all-gathered from every rank's tokens: the inverse of `shard`."""
        of_ranks = [torch.empty_like(x_BT) for _ in range(self.size)]
        group = dist.distributed_c10d._resolve_process_group(self.group)
        dist.all_gather(of_ranks, x_BT.contiguous(), group=group)
        cuts = {
            piece: part
            for rank, tokens in enumerate(of_ranks)
            for piece, part in zip(pieces(rank, self.size), tokens.chunk(2, dim=1), strict=True)
        }
        return torch.cat([cuts[piece] for piece in range(2 * self.size)], dim=1)

    def attend(self, documents_BW: Tensor | None) -> Attend:
        """Attention over full rows from this rank's tokens; `documents_BW` are those of full rows, None: one each."""
        known = [] if documents_BW is None else make_block_mask(documents_BW, self.size)
        full_rows = partial(_attend, self.group, documents_BW, known)

        @cache
        def chunked(chunk: int, batch: int, length: int, device: torch.device) -> Attend:
            """Chunks are documents to the ring."""
            numbers_BW = in_chunks(documents_BW, chunk, batch, length * self.size, device)
            known = [] if torch.compiler.is_compiling() else make_block_mask(numbers_BW, self.size)
            return partial(_attend, self.group, numbers_BW, known)

        def attend(layer: int, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions) -> Tensor:
            if not options.chunk:
                return full_rows(layer, q_BTND, k_BTKD, v_BTKD, options)
            make = chunked.__wrapped__ if torch.compiler.is_compiling() else chunked
            return make(options.chunk, *q_BTND.shape[:2], q_BTND.device)(layer, q_BTND, k_BTKD, v_BTKD, options)

        return attend


def _attend(
    group: str,
    documents_BW: Tensor | None,
    known: list[int],
    layer: int,
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    options: AttentionOptions,
) -> Tensor:
    q, k, v = (x.to(v_BTKD.dtype) for x in (q_BTND, k_BTKD, v_BTKD))
    block_mask = [] if torch.compiler.is_compiling() else known  # else every step's documents would be compiled again
    settings = (options.scale_for(q.shape[-1]), options.window, options.softcap, group, block_mask)
    return ring_attention(q, k, v, documents_BW, options.sinks_N, options.slopes_N, *settings)[0]  # type: ignore[no-any-return]


def agree_on_length(model: Transformer, context: Context) -> None:
    """RoPE scaling that depends on the longest position must use that of all ranks."""
    rotary = model.rotary
    if rotary is not None and rotary.rope.scaling in ("dynamic", "longrope") and rotary.fixed_length is None:
        rotary.ring = context.group  # type: ignore[assignment]
        swap_class(rotary, _with_longest_of_all)


@cache
def _with_longest_of_all(kind: type[nn.Module]) -> type[nn.Module]:
    def full(table: nn.Module, positions_BT: Tensor) -> Tensor:
        longest = positions_BT.max()
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=dist.distributed_c10d._resolve_process_group(table.ring))
        frequencies = inverse_frequencies(table.rope, table.rope.theta, table.dim, table.context, int(longest) + 1)
        return frequencies.to(positions_BT.device)

    return type(f"Agreeing{kind.__name__}", (kind,), {"_full": full})
