"""The waiting queue, in the order of service, and the deadlines.

The order never changes: a request's key is its arrival plus `ageing_s` per priority level. So priority is worth a fixed
time, waiting requests move ahead of later ones at the same rate, and none starves.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from armillary.engine.request.sequence import Sequence, State


class Waiting:
    """Waiting sequences, first come first served or by aged priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (seq for _, seq in self._heap if seq.state is State.WAITING)

    def push(self, seq: Sequence) -> None:
        """A new or preempted sequence: its place follows from its arrival."""
        heappush(self._heap, (seq.order, seq))
        self._size += 1

    def first(self) -> Sequence | None:
        """The next sequence; it stays in the queue."""
        heap = self._heap
        while heap and heap[0][1].state is not State.WAITING:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        seq = self.first()
        assert seq is not None, "the queue is empty"
        heappop(self._heap)
        self._size -= 1
        return seq

    def left(self) -> None:
        """A waiting sequence was finished elsewhere; its entry is dropped when it comes up."""
        self._size -= 1


class Deadlines:
    """Deadlines of sequences, the next first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, int], bool]] = []
        self._alive: dict[tuple[int, int], Sequence] = {}

    def add(self, at: float, seq: Sequence, *, only_waiting: bool = False) -> None:
        """`only_waiting`: the deadline holds only while the sequence has not started."""
        heappush(self._heap, (at, seq.order[1:], only_waiting))
        self._alive[seq.order[1:]] = seq

    def forget(self, seq: Sequence) -> None:
        """Drop a finished sequence, so that its tokens are not kept until the deadline."""
        self._alive.pop(seq.order[1:], None)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences past their deadline, each once."""
        if not self._heap:
            return []
        expired: dict[tuple[int, int], Sequence] = {}
        while (at := self.next()) is not None and at <= now:
            _, key, _ = heappop(self._heap)
            expired[key] = self._alive[key]
        return list(expired.values())

    def next(self) -> float | None:
        """The next deadline that still holds: one of a finished sequence would wake an idle engine for ever."""
        while self._heap and not self._holds(*self._heap[0][1:]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _holds(self, key: tuple[int, int], only_waiting: bool) -> bool:
        seq = self._alive.get(key)
        return seq is not None and not (only_waiting and seq.started_at is not None)
