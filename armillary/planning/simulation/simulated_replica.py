"""One replica of a simulated fleet: the real scheduler, KV cache and loop on a virtual clock of its own.

Steps are run one by one, but for stretches in which all running sequences only decode: those are planned as a whole,
and cut short where a request arrives.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from math import inf
from typing import NamedTuple

from armillary.engine.cache.prefix_reuse_stats import PrefixReuse
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decode_stretch import skip_steps, steady_steps
from armillary.engine.scheduler.prefill_stretch import PrefillStretch, prefill_stretch
from armillary.engine.scheduler.step_loop import Loop
from armillary.errors import BadInput
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.planning.simulation.simulated_device import SimulatedDevice
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.step_cost import StepCost

_LONGEST_STRETCH = 4096
_NAP_S = 1e-3
"""the engine's sleep where no sequence can start yet"""


class Served(NamedTuple):
    """A request that is over."""

    number: int
    replica: str
    arrived_s: float
    started_s: float
    first_s: float
    """inf: it waited for longer than serve.max_wait_s"""
    end_s: float
    tokens_in: int
    tokens_out: int
    cached: int
    first_gap: int
    """index of its first gap among those of the replica"""
    end_gap: int


class SimulatedReplica:
    """A server with one engine. `wake` is the time of the next thing that happens in it."""

    def __init__(
        self, name: str, system: System, cost: StepCost, *, now: float = 0.0, seed: int = 0, stretches: bool = True
    ) -> None:
        """Without `stretches`, every step is run: the slow reference."""
        self.name = name
        self.scheduler = system.scheduler()
        if not system.prefix:
            self.scheduler.request_table.prefix_reuse = PrefixReuse(capacity=0)  # nobody reads it
        self.device = SimulatedDevice(
            cost,
            seed=seed,
            overlap=system.overlap,
            drafting=system.drafting,
            num_stages=system.settings.num_stages,
        )
        self.device.now = now
        self.wake = inf
        self.busy_s = 0.0
        self.num_steps = 0
        self.gaps = array("d")
        """seconds of each step that decoded"""
        self.gap_weights = array("I")
        """tokens that had it"""
        self.ttfts = array("d")
        """seconds to the first token of each request, in the order of those tokens"""
        self._loop = Loop(self.scheduler, self.device, overlap=system.overlap, clock=self.device.clock)
        self._stretches = stretches and self.device.can_skip
        self._ends: list[float] = []  # of the stretch's steps
        self._steps = 0  # of the stretch that is planned
        self._follows = self._stretches and system.overlap
        self._prefilling: PrefillStretch | None = None  # the stretch under way
        self._over: list[Served] = []  # by the step under way, which ends at `wake`
        self._first_gap: dict[str, int] = {}
        self._preempted_at: dict[str, float] = {}

    @property
    def in_flight(self) -> int:
        return len(self.scheduler.request_table.requests)

    def submit(self, arrival: Arrival, prompt: list[int], now: float) -> bool:
        """Queue a request; False where it is invalid or the queue is full."""
        request = Request(id=str(arrival.number), prompt=prompt, params=arrival.params)
        if arrival.tokens_out < arrival.limit:
            self.device.lengths[request.id] = arrival.tokens_out
        try:
            for seq in self.scheduler.submit(request, now):
                seq.number = arrival.number
                seq.arrived_at = arrival.at_s  # also where it has waited elsewhere
        except BadInput:
            return False
        if self.wake == inf:
            self.device.now = self.wake = max(self.device.now, now)
        elif self._steps:
            self._steps = min(self._steps, bisect_left(self._ends, now) + 1)
            self.wake = self._ends[self._steps - 1]
        return True

    def advance(self, until: float) -> list[Served]:
        """Everything before a time; returns the requests that ended. What begins at that very time may still get more
        requests."""
        over: list[Served] = []
        while self.wake < until:
            if self._over:
                over += self._over
                self._over = []
            if self._steps:
                self._skip()
            if not (self._follows and self._prefill(until)):
                self._plan()
        return over

    def end_stretch(self) -> None:
        """Bring sequences and blocks up to the steps so far: those of a prefill stretch are behind while it lasts."""
        if self._prefilling is not None:
            self._prefilling.close()
            self._prefilling = None

    def lost(self) -> list[tuple[int, bool]]:
        """(number, whether its output had begun) of every unfinished request: the replica is gone."""
        lost = [seq for many in self.scheduler.request_table.requests.values() for seq in many[:1]]
        numbers = [(seq.number, seq.first_token_at is not None) for seq in lost]
        numbers += [(served.number, served.tokens_out > 1) for served in self._over]  # their last step was not over
        self.wake, self._steps, self._over = inf, 0, []
        return numbers

    # --- one step, or many

    def _plan(self) -> None:
        scheduler = self.scheduler
        if not scheduler.has_work and not scheduler.under_way:
            self.wake = inf
            return
        steps = self._steady()
        if steps:
            self._ends = self.device.ends(scheduler.request_table.running, steps)
            self._steps, self.wake = steps, self._ends[steps - 1]
        else:
            self._step()

    def _steady(self) -> int:
        """Steps that can be planned at once; the step that ends a request is left to the loop."""
        return steady_steps(self.scheduler, self._most_steps()) if self._stretches else 0

    def _most_steps(self) -> int:
        """Steps before the one that ends a request."""
        most, lengths = _LONGEST_STRETCH, self.device.lengths
        if lengths:
            for seq in self.scheduler.request_table.running:
                length = lengths.get(seq.request.id)
                if length is not None and not seq.is_prefilling:
                    most = min(most, length - 2 - seq.computed + seq.num_prompt)
        return most

    def _prefill(self, until: float) -> bool:
        """Steps of a prefill stretch that begin before a time; False where none does."""
        device, stretch = self.device, self._prefilling or prefill_stretch(self.scheduler, self._most_steps())
        if stretch is None:
            return False
        begin, before = self.num_steps, device.now
        while before < until:
            work = stretch.decide()
            if work is None:
                break
            device.follow(work)
            now = device.now
            stretch.update(before, now)
            self.gaps.append(now - before)
            self.gap_weights.append(stretch.num_decodes)
            self.busy_s += now - before
            self.num_steps += 1
            before = now
        self._prefilling, self.wake = stretch, before
        if before < until:
            self.end_stretch()
        return self.num_steps > begin

    def _skip(self) -> None:
        """The planned stretch is over."""
        device, steps, before = self.device, self._steps, self.device.now
        device.skip_to(self._ends, steps)
        gaps = [after - at for at, after in zip([before, *self._ends], self._ends[:steps], strict=False)]
        self.gaps.extend(gaps)
        self.gap_weights.extend([len(self.scheduler.request_table.running)] * steps)
        self.busy_s += device.now - before
        self.num_steps += steps
        skip_steps(self.scheduler, steps, gaps, device.now)
        self._steps = 0

    def _step(self) -> None:
        device, before = self.device, self.device.now
        device.collected = None
        decision, outcome = self._loop.step()
        for seq in decision.preempted:
            self._preempted_at.setdefault(seq.id, before)
        if device.collected is not None:
            taken = device.collected
            sampled = len(taken.sampling)
            if taken.drafts:  # they come together
                sampled -= sum(draft.count for draft in taken.drafts)
            self._note_gaps(sampled, taken.prefill_done, device.now - before)
        elif decision.empty and not self.scheduler.request_table.running:
            self._nap()
        self.num_steps += not decision.empty
        self.busy_s += device.now - before
        if outcome.finished or decision.ended:
            self._over = [self._served(seq) for seq in (*outcome.finished, *decision.ended)]
        self.wake = device.now

    def _note_gaps(self, sampled: int, first: list[Sequence], gap_s: float) -> None:
        if sampled > len(first):
            self.gaps.append(gap_s)
            self.gap_weights.append(sampled - len(first))
        for seq in first:
            if seq.id in self._preempted_at:
                self.gaps.append(self.device.now - self._preempted_at.pop(seq.id))
                self.gap_weights.append(1)
            if seq.id not in self._first_gap:
                self._first_gap[seq.id] = len(self.gaps)
                self.ttfts.append(self.device.now - seq.arrived_at)

    def _nap(self) -> None:
        """No sequence can start now: wait until a window closes or a deadline passes."""
        now = self.device.now
        wake = self.scheduler.request_table.wake_at(now)
        self.device.now = now + _NAP_S if wake is None or wake <= now else wake

    def _served(self, seq: Sequence) -> Served:
        self.device.lengths.pop(seq.request.id, None)
        first, started, end = seq.first_token_at, seq.started_at, seq.finished_at
        assert end is not None, "it is over"
        return Served(
            number=seq.number,
            replica=self.name,
            arrived_s=seq.arrived_at,
            started_s=inf if started is None else started,
            first_s=inf if first is None else first,
            end_s=end,
            tokens_in=seq.num_prompt,
            tokens_out=seq.num_output,
            cached=seq.cached_tokens,
            first_gap=self._first_gap.pop(seq.id, len(self.gaps)),
            end_gap=len(self.gaps),
        )
