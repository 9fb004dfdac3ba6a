"""Taking a decision back that an executor had no memory for: every sequence stands where it stood before.

Blocks, rows and table entries that were given out stay so, and the executor learns of them with the next decision.
"""

from __future__ import annotations

from armillary.engine.cache.kv_cache import Copy
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision


def take_back(decision: Decision) -> list[Sequence]:
    """Nothing of the decision was computed; the sequences that were in it and are not over."""
    ends = [
        *zip(decision.decodes, decision.positions, strict=True),
        *((chunk.sequence, chunk.start) for chunk in decision.chunks),
    ]
    inside = [(seq, begin) for seq, begin in ends if seq.finish is None]
    prompts = {id(seq) for seq in (*decision.prefill_done, *(chunk.sequence for chunk in decision.chunks))}
    for seq, begin in inside:
        seq.computed = begin
        if id(seq) in prompts:
            seq.is_prefilling, seq.num_allocated = True, 0
    return [seq for seq, _ in inside]


def keep_some(decision: Decision, first: int, count: int) -> None:
    """Of a decision that has only decodes so far, `count` from the `first` on, going round; the others wait."""
    pairs = list(zip(decision.decodes, decision.positions, strict=True))
    first %= len(pairs)
    pairs = pairs[first:] + pairs[:first]
    for seq, position in pairs[count:]:
        seq.computed = position
    kept = {id(seq) for seq, _ in pairs[:count]}
    decision.decodes = [seq for seq, _ in pairs[:count]]
    decision.positions = [position for _, position in pairs[:count]]
    decision.last = [seq for seq in decision.last if id(seq) in kept]


def as_one(copies: list[Copy]) -> list[Copy]:
    """Copies that were to be made one after the other, as ones that are all read before any is written."""
    sources: dict[int, int] = {}
    for source, target in copies:
        sources[target] = sources.get(source, source)
    return [Copy(source, target) for target, source in sources.items() if source != target]
