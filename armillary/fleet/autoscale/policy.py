"""How many replicas a service needs: target tracking over a stable and a panic window. Time is an argument.

Every signal says how many replicas it needs, and the largest counts:

rate        r + β·√r, r the requests per second when a replica started now is ready / (capacity · target)
in flight   requests at replicas / those of a replica at its capacity
waiting     ready · waiting per replica / its limit
KV, GPU     ready · usage / its limit
latency     ready · latency / objective, where more than 1 % of the requests since the last change miss one

All but the rate saturate: they ask for half as many again as are ready at most, and for none beyond those that are
starting already, since what queues meanwhile is what these are for. The target follows the error budget: 5 %
higher while no request of the last windows missed an objective, 5 % lower where 2 % did.

The rate is extrapolated by the time that a start takes, along the least trend that its noise allows; one that falls in
spite of its noise, to now. Up: at once. Down: to the largest number that a decision of the last half cooldown needed
(of a whole one before the first of several stops), not within a cooldown of a start, and not while the rate grows. Up
again not within a cooldown of the first stop of several. So the direction changes at most once per cooldown.
Windows as in Knative's autoscaler (stable and panic), stabilisation as in Kubernetes' HPA.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from math import ceil, floor
from typing import Any

from armillary.fleet.autoscale.replica_capacity import MAY_MISS, Capacity, Limits
from armillary.fleet.autoscale.signals import SignalHistory, Signals
from armillary.spec.tables.fleet import Autoscale

_DEFAULT_START_S = 60.0
_STARTS = 8
"""measured starts whose mean counts"""
_MOST_AHEAD = 1.25
"""rate that is expected over the present one, at most: a step looks like a slope to a window"""
_TREND = 4.0
"""stable windows over which the trend of the rate is taken: its error falls with the window to the power of 1.5"""
_HOLD = 0.5
"""cooldowns for which a decision's number is kept on the way down. With 1 instead, simulated days of 270 s cost 5 to
8 % more; the direction changes as seldom either way (benchmarks/simulator.md, 2026-11-19)"""
_MOST_MORE = 1.5
"""replicas over those that are ready that a signal which saturates can ask for: beyond its limit it says that there are
too few, not how few"""
_BUDGET = 0.05
"""most by which the target moves with the error budget (benchmarks/simulator.md, 2026-11-19)"""
_STOPPED = 4
"""one of so many replicas is stopped per panic window, at most: none can be started for a cooldown after the first"""
_TOLERANCE = 0.05
"""demand this little above a whole number of replicas starts none"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many replicas there should be, and why."""

    now: float
    replicas: int
    """that there should be"""
    before: int
    reason: str
    panic: bool = False
    needs: dict[str, float] = field(default_factory=dict)
    """replicas that each signal needs"""

    @property
    def change(self) -> int:
        return self.replicas - self.before

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "needs": {name: round(value, 3) for name, value in self.needs.items()}}


class Autoscaler:
    """Decides; it starts and stops nothing itself."""

    def __init__(self, settings: Autoscale, limits: Limits, *, start_s: float | None = None) -> None:
        """`start_s`: how long a start takes, until one was measured."""
        assert settings.max_replicas is not None, "an autoscaler has a limit"
        self.settings, self.capacity = settings, Capacity(limits)
        self.given_start_s = start_s
        self._starts: deque[float] = deque(maxlen=_STARTS)
        self._history = SignalHistory(max(_TREND * settings.stable_window_s, settings.panic_window_s))
        self._needed: deque[tuple[float, int]] = deque()  # by the decisions of the last cooldown
        self._panic_until = float("-inf")
        self._changed_at = self._raised_at = self._lowered_at = self._turned_at = float("-inf")
        self._ready, self._resized_at = -1, float("-inf")  # replicas that are ready, and since when
        self._falling = False  # the last change stopped replicas
        self._first_at: float | None = None
        self._busy_at: float | None = None

    @property
    def start_s(self) -> float:
        """Time that a start takes."""
        if self._starts:
            return sum(self._starts) / len(self._starts)
        return _DEFAULT_START_S if self.given_start_s is None else self.given_start_s

    def started(self, seconds: float) -> None:
        """A replica was ready after so long."""
        self._starts.append(seconds)

    def decide(self, signals: Signals) -> Decision:
        """One decision."""
        now, settings = signals.now, self.settings
        self._first_at = now if self._first_at is None else self._first_at
        if signals.in_flight or signals.arrived_per_s or signals.waiting or self._busy_at is None:
            self._busy_at = now
        if signals.ready != self._ready:
            self._resized_at = now if self._ready >= 0 else self._resized_at
            self._ready = signals.ready
        self._history.add(signals)
        unchanged_s = now - max(self._changed_at, self._resized_at)
        self.capacity.learn(self._settled_looks(now), unchanged=unchanged_s > settings.stable_window_s)
        stable, short = self._needs(signals, settings.stable_window_s), self._needs(signals, settings.panic_window_s)
        seen_s = now - self._first_at
        if seen_s >= settings.panic_window_s and max(short.values()) >= settings.panic * max(1, signals.replicas):
            self._panic_until = now + settings.stable_window_s
        panic = now < self._panic_until
        needs = short if panic and max(short.values()) > max(stable.values()) else stable
        wanted, why = self._bounded(signals, needs)
        return self._settled(signals, wanted, why, needs, panic)

    # --- demand

    def _needs(self, signals: Signals, window_s: float) -> dict[str, float]:
        settings, capacity, mean = self.settings, self.capacity, self._history.mean
        ready = max(1, signals.ready)
        long, short = (self._history.slope("arrived_per_s", n * settings.stable_window_s) for n in (_TREND, 1.0))
        slope = min(long.slope - long.error, short.slope)  # a step within the long window is no trend any more
        falls = min(0.0, max(long.slope + long.error, short.slope)) if signals.now >= self._panic_until else 0.0
        rate = max(0.0, mean("arrived_per_s", window_s) + falls * window_s / 2)
        ahead = max(0.0, slope) * (self.start_s + window_s / 2)  # the mean is as old as half its window
        most = _MOST_AHEAD * mean("arrived_per_s", settings.panic_window_s)
        needs = {"rate": capacity.replicas_for(max(rate, min(rate + ahead, most)), self._target(signals.now))}
        most_more = _MOST_MORE * ready if not signals.starting else min(_MOST_MORE * ready, float(signals.replicas))
        used = {
            "in flight": mean("in_flight", window_s) / ready / capacity.in_flight,
            "waiting": mean("waiting", window_s) / ready / settings.max_waiting,
            "KV": mean("kv_used", window_s) / settings.max_kv_used,
        }
        if settings.max_gpu_used is not None and signals.gpu_used is not None:
            used["GPU"] = mean("gpu_used", window_s) / settings.max_gpu_used
        if not signals.starting:
            used["latency"] = capacity.missed(self._settled_looks(signals.now))
        needs |= {name: min(most_more, ready * share) for name, share in used.items()}
        return needs

    def _target(self, now: float) -> float:
        """autoscale.target, moved by the error budget: up while none is spent, down where more than all of it is."""
        missed = self.capacity.missed_share(self._history.since(now - _TREND * self.settings.stable_window_s))
        return self.settings.target * (1 if missed is None else 1 + _BUDGET * max(-1.0, 1 - missed / MAY_MISS))

    def _settled_looks(self, now: float) -> list[Signals]:
        """Those of the stable window that say how this many replicas serve: what waited for new ones is over."""
        since = max(self._changed_at, self._resized_at) + self.settings.panic_window_s
        return self._history.since(max(since, now - self.settings.stable_window_s))

    # --- bounds

    def _bounded(self, signals: Signals, needs: dict[str, float]) -> tuple[int, str]:
        """The replicas for these needs within every limit, and why so many."""
        settings, before = self.settings, signals.replicas
        name = max(needs, key=lambda each: needs[each])
        wanted, why = ceil(needs[name] - _TOLERANCE), f"{name} needs {needs[name]:.1f}"
        fastest = max(before + 1, floor(before * settings.max_rate_up))
        if wanted > fastest:
            wanted, why = fastest, f"{why}, at most {settings.max_rate_up:g} × at once"
        least = self._least(signals)
        if wanted < least:
            wanted, why = least, f"at least {least}" if needs[name] <= least else why
        assert settings.max_replicas is not None
        if wanted > settings.max_replicas:
            wanted, why = settings.max_replicas, f"{why}, at most {settings.max_replicas} replicas"
        affordable = self._affordable()
        if wanted > affordable:
            wanted, why = affordable, f"{why}, at most ${settings.max_usd_per_hour:g} per hour"
        return wanted, why

    def _least(self, signals: Signals) -> int:
        """min_replicas; for a service that may have none, one until it was idle for long enough."""
        if self.settings.min_replicas or self._busy_at is None:
            return self.settings.min_replicas
        asked = bool(signals.waiting or signals.in_flight or signals.arrived_per_s)
        idle_for = signals.now - self._busy_at
        return 1 if asked or (signals.replicas and idle_for < self.settings.idle_s) else 0

    def _affordable(self) -> int:
        price, most = self.capacity.limits.usd_per_hour, self.settings.max_usd_per_hour
        return 1 << 30 if most is None or not price else floor(most / price + 1e-9)

    # --- stability

    def _settled(self, signals: Signals, wanted: int, why: str, needs: dict[str, float], panic: bool) -> Decision:
        """Up at once, down only to what the last half cooldown needed."""
        now, before, settings = signals.now, signals.replicas, self.settings
        self._needed.append((now, wanted))
        while self._needed[0][0] <= now - settings.cooldown_s:
            self._needed.popleft()
        lowered_s = now - self._turned_at
        if wanted > before and before and self._falling and lowered_s < settings.cooldown_s:
            wanted, why = before, f"{why}, but replicas were stopped {lowered_s:.0f} s ago"
        elif wanted < before:
            wanted, why = self._lowered(signals, wanted, why, panic)
        if wanted == before:
            return Decision(now=now, replicas=before, before=before, reason=why, panic=panic, needs=needs)
        self._changed_at = now
        if self._falling != (wanted < before):
            self._falling, self._turned_at = wanted < before, now
        if wanted > before:
            self._raised_at = now
        else:
            self._lowered_at = now
        return Decision(now=now, replicas=wanted, before=before, reason=why, panic=panic, needs=needs)

    def _lowered(self, signals: Signals, wanted: int, why: str, panic: bool) -> tuple[int, str]:
        now, before, cooldown_s = signals.now, signals.replicas, self.settings.cooldown_s
        if before > self._affordable() or before > (self.settings.max_replicas or before):
            return wanted, why
        if panic:
            return before, f"{why}, but nothing is stopped in panic mode"
        trend = self._history.slope("arrived_per_s", _TREND * self.settings.stable_window_s)
        if trend.slope > trend.error:
            return before, f"{why}, but the rate grows"
        since = now - max(self._raised_at, self._first_at or 0.0)
        if since < cooldown_s:
            return before, f"{why}, but the last start was {since:.0f} s ago"
        hold_s = (_HOLD if self._falling else 1.0) * cooldown_s  # the first stop rules out a start for a cooldown
        needed = min(before, max(count for at, count in self._needed if at > now - hold_s))
        if now - self._lowered_at < self.settings.panic_window_s:
            return before, f"{why}, but replicas were stopped {now - self._lowered_at:.0f} s ago"
        fewest = before - max(1, before // _STOPPED)
        if needed < fewest:
            return fewest, f"{why}, at least {fewest} after a stop"
        return needed, why if needed == wanted else f"{why}, {needed} within the last {hold_s:g} s"
