"""Which KV heads go from which rank of a prefill server to which rank of a decode server.

    n ≤ K ranks     rank r has heads [r · K / n, (r + 1) · K / n) of K
    n > K ranks     n / K ranks have the same head; the ranks of the other side share the work of sending it

Latents are one head that every rank has. Between servers of as many ranks, rank r sends rank r all that it has.
"""

from __future__ import annotations

from typing import NamedTuple


class HeadSlice(NamedTuple):
    """Heads as places among those of the rank, none: all that it has."""

    sent: range | None
    received: range | None


def divides(kv_heads: int, ranks: int) -> bool:
    return ranks > 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def own_heads(kv_heads: int, ranks: int, rank: int) -> range:
    if ranks > kv_heads:
        head = rank // (ranks // kv_heads)
        return range(head, head + 1)
    local = kv_heads // ranks
    return range(rank * local, (rank + 1) * local)


def head_slices(kv_heads: int, senders: int, receivers: int) -> dict[tuple[int, int], HeadSlice]:
    """(sender, receiver) -> heads, for pairs with something to exchange; rank 0 with rank 0 is one of them, and no pair
    exchanges more heads."""
    if senders == receivers:
        return {(rank, rank): HeadSlice(None, None) for rank in range(senders)}
    slices, copies = {}, max(1, senders // kv_heads)
    for receiver in range(receivers):
        wanted = own_heads(kv_heads, receivers, receiver)
        for sender in range(receiver % copies, senders, copies):
            own = own_heads(kv_heads, senders, sender)
            begin, end = max(own.start, wanted.start), min(own.stop, wanted.stop)
            if begin < end:
                slices[sender, receiver] = HeadSlice(
                    range(begin - own.start, end - own.start), range(begin - wanted.start, end - wanted.start)
                )
    return slices
