"""Who waits, in the order in which they are served, and until when.

The order never changes: a request's place is its arrival plus `ageing_s` for every step of priority. So priority
buys a fixed time, everybody who waits moves up against later ones at the same pace, and nobody starves.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from armillary.engine.request.sequence import Sequence, State


class Waiting:
    """Sequences that want to run, first come first or by aged priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (seq for _, seq in self._heap if seq.state is State.WAITING)

    def push(self, seq: Sequence) -> None:
        """New, or put back: its place is that of its arrival."""
        heappush(self._heap, (seq.order, seq))
        self._size += 1

    def first(self) -> Sequence | None:
        """The next to be served; it stays."""
        heap = self._heap
        while heap and heap[0][1].state is not State.WAITING:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """The next to be served."""
        seq = self.first()
        assert seq is not None, "nobody waits"
        heappop(self._heap)
        self._size -= 1
        return seq

    def left(self) -> None:
        """One that waited has been finished elsewhere; its entry goes when it comes up."""
        self._size -= 1


class Deadlines:
    """Times at which requests are given up, the next first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, int], bool]] = []
        self._alive: dict[tuple[int, int], Sequence] = {}

    def add(self, at: float, seq: Sequence, *, only_waiting: bool = False) -> None:
        """`only_waiting`: it counts only while the sequence has not started."""
        heappush(self._heap, (at, seq.order[1:], only_waiting))
        self._alive[seq.order[1:]] = seq

    def forget(self, seq: Sequence) -> None:
        """It is over: its tokens need not be kept until the time comes."""
        self._alive.pop(seq.order[1:], None)

    def due(self, now: float) -> list[Sequence]:
        """Those whose time has come, each once."""
        found: dict[tuple[int, int], Sequence] = {}
        while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._alive):
            _, key, only_waiting = heappop(self._heap)
            seq = self._alive.get(key)
            if seq is not None and not (only_waiting and seq.started_at is not None):
                found[key] = seq
        return list(found.values())

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None
