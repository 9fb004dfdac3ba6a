"""Preemption: which sequences lose their blocks where others need them, the last in order of service first."""

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.request_table import RequestTable


def preempt_until_fits(request_table: RequestTable, decision: Decision, seq: Sequence, upto: int) -> bool:
    """Allocate blocks for the tokens of `seq` below `upto`, preempting later sequences, last first, that have no part
    in this step yet; False where there are not enough. The first in order can always go on, so every step makes
    progress and every sequence becomes the first."""
    while not request_table.cache.grow(seq, upto):
        victim = _victim(request_table, decision, seq)
        if victim is None:
            return False
        request_table.preempt(victim)
        decision.preempted.append(victim)
    return True


def fitting(request_table: RequestTable, decision: Decision, seq: Sequence, count: int) -> int:
    """Allocate blocks for the next `count` tokens, for fewer if fewer are free, or for one block's worth by preemption;
    returns the number of tokens."""
    cache, start = request_table.cache, seq.computed
    if cache.grow(seq, start + count):
        return count
    size, free = cache.block_tokens, cache.pool.num_free // len(seq.tables)
    fewer = min(count, (len(seq.tables[0]) + free) * size - start)
    if fewer > 0 and cache.grow(seq, start + fewer):
        return fewer
    fewer = min(count, size - start % size)
    return fewer if preempt_until_fits(request_table, decision, seq, start + fewer) else 0


def _victim(request_table: RequestTable, decision: Decision, seq: Sequence) -> Sequence | None:
    """The last sequence in order, if it comes after `seq` and has no part in this step yet."""
    taken = set(map(id, decision.decodes)) | {id(chunk.sequence) for chunk in decision.chunks}
    later = (other for other in reversed(request_table.running) if other.order > seq.order)
    return next((other for other in later if id(other) not in taken), None)
