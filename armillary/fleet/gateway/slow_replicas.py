"""Replicas that still answer their health checks, but whose streams have become slow: outliers among their peers.

Twice a second, the gap between chunks of each replica's open streams is taken over the last two seconds: the time that
streams waited, over the chunks that came. A replica whose gap is `slow_factor` times that of its peers (or, where they
have no streams, its own before) leaves the rotation while others work. A short stream of the gateway's decides then:
if it is slow, too, the replica stays out, and clients' streams that do not recover end with an error; else it is back,
as a client's stream may pause for a reason. Time in which the client was the one who is slow does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

from armillary.fleet.gateway.gateway_config import GatewaySettings, ModelSettings
from armillary.fleet.gateway.health import stream_gap_s
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.routing import Replica
from armillary.fleet.gateway.upstream import UpstreamConnection
from armillary.units import seconds_text

TICK_S = 0.5
_TICKS = 4
_ENOUGH = 0.9
"""streams have to be open for this share of the window, on average at least one"""
_USUAL_WEIGHT = 0.1
"""of the last window in a replica's own usual gap"""
_FIRST, _MOST = 2, 20
"""ticks until a replica is tried again, twice as many each time"""
_FORGET_S = 30.0
"""time without being slow after which it is tried soon again"""
_PROBED = ("auto", "ready", "completion")
"""settings of `probe` under which a health check may cost tokens"""
_FEW = 2
"""requests more than another replica has that never explain why one is slow"""


@dataclass(slots=True)
class StreamPace:
    """How fast the streams of one replica are."""

    chunks: int  # that its connections had received at the last tick
    tick_s: float
    ticks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_TICKS))  # stream-seconds, chunks
    usual_s: float | None = None
    slow_since: float | None = None
    limit_s: float = 0.0  # gap above which it counts as slow, of the time when it became so
    confirmed: bool = False  # by a stream of the gateway's own
    times: int = 0  # in a row that it was slow
    next_probe: float = 0.0
    probe: asyncio.Task[None] | None = None
    begun: dict[UpstreamConnection, int] = field(default_factory=dict)  # streams when it became slow, and their chunks

    def add(self, seconds: float, streams: int, chunks: int) -> None:
        self.ticks.append((seconds * streams, chunks - self.chunks))
        self.chunks = chunks

    @property
    def gap_s(self) -> float | None:
        """Mean time between chunks of a stream; None where too few were open to tell."""
        waited_s = sum(seconds for seconds, _ in self.ticks)
        if len(self.ticks) < _TICKS or waited_s < _ENOUGH * _TICKS * self.tick_s:
            return None
        return waited_s / max(1, sum(chunks for _, chunks in self.ticks))


class SlowReplicas:
    """Watches the streams of all replicas until cancelled."""

    def __init__(
        self, models: Models, settings: GatewaySettings, say: Callable[[str], None], *, tick_s: float = TICK_S
    ) -> None:
        self._models, self._settings, self._say, self._tick_s = models, settings, say, tick_s
        self._paces: dict[Replica, StreamPace] = {}

    async def run(self) -> None:
        last = time.monotonic()
        try:
            while self._settings.slow_factor:
                await asyncio.sleep(self._tick_s)
                now = time.monotonic()
                self.tick(now, now - last)
                last = now
        finally:
            for speed in self._paces.values():
                if speed.probe is not None:
                    speed.probe.cancel()

    def tick(self, now: float, seconds: float) -> None:
        """Look at the `seconds` since the last call."""
        present = self._models.replicas()
        for gone in self._paces.keys() - {replica for _, replica in present}:
            self._paces.pop(gone)
        for _, replica in present:
            pool = replica.link.pool
            speed = self._paces.setdefault(replica, StreamPace(pool.stream_chunks, self._tick_s))
            speed.add(seconds, len(pool.open_streams()), pool.stream_chunks)
            if seconds > 2 * self._tick_s:  # the gateway itself did not run meanwhile
                speed.ticks.clear()
        for model, replica in present:
            self._judge(model, replica, self._paces[replica], now)

    def _judge(self, model: ModelSettings, replica: Replica, speed: StreamPace, now: float) -> None:
        gap_s, usual_s = speed.gap_s, self._peers_gap_s(model, replica) or speed.usual_s
        if speed.slow_since is not None:
            self._judge_slow(model, replica, speed, now)
        elif gap_s is None:
            return
        elif usual_s is not None and gap_s >= max(self._settings.slow_gap_s, self._settings.slow_factor * usual_s):
            if self._has_other(model, replica) and now >= speed.next_probe:
                self._leaves(replica, speed, now, gap_s, usual_s)
        else:
            speed.usual_s = gap_s if speed.usual_s is None else speed.usual_s + _USUAL_WEIGHT * (gap_s - speed.usual_s)
            if now > speed.next_probe + _FORGET_S:
                speed.times = 0

    def _leaves(self, replica: Replica, speed: StreamPace, now: float, gap_s: float, usual_s: float) -> None:
        replica.slow, speed.slow_since, speed.next_probe, speed.confirmed = True, now, now, False
        speed.limit_s = max(self._settings.slow_gap_s, self._settings.slow_factor * usual_s)
        speed.begun = {stream: stream.chunks for stream in replica.link.pool.open_streams()}
        texts = f"{seconds_text(gap_s)} between chunks of its streams, {seconds_text(usual_s)} elsewhere or before"
        self._say(f"{replica.link.settings.url} gets no requests while others work: it is slow ({texts})")

    def _judge_slow(self, model: ModelSettings, replica: Replica, speed: StreamPace, now: float) -> None:
        assert speed.slow_since is not None
        gap_s = speed.gap_s
        if gap_s is not None and gap_s < speed.limit_s / 2:
            return self._returns(replica, speed, now)
        if speed.confirmed and now > speed.slow_since + self._settings.slow_grace_s and self._helps(model, replica):
            self._end_streams(replica, speed, now)
        if now >= speed.next_probe and (speed.probe is None or speed.probe.done()):
            speed.probe = asyncio.create_task(self._probe(model, replica, speed))
        return None

    def _helps(self, model: ModelSettings, replica: Replica) -> bool:
        """Whether another replica works, and this one is not slow for having far more to do: it will get through."""
        peers = [each.in_flight for each in self._others(model, replica) if each.up and not each.drained]
        return bool(peers) and replica.in_flight <= 2 * (min(peers) + _FEW)

    def _end_streams(self, replica: Replica, speed: StreamPace, now: float) -> None:
        """End what is still slow, and send requests without an answer to another replica."""
        assert speed.slow_since is not None
        reason, seconds = "it has become far slower than other replicas", now - speed.slow_since
        for stream in replica.link.pool.open_streams():
            if stream in speed.begun and seconds / max(1, stream.chunks - speed.begun[stream]) >= speed.limit_s:
                stream.fail(reason)
        replica.link.pool.fail_unanswered(reason, sent_before=speed.slow_since)

    async def _probe(self, model: ModelSettings, replica: Replica, speed: StreamPace) -> None:
        """Whether a stream of the gateway's own is slow, too. Where it may send none, the clients' say so; without any
        the replica is back after a pause."""
        pause_s = self._tick_s * min(_MOST, _FIRST * 2**speed.times)
        if model.probe in _PROBED:
            gap_s = await stream_gap_s(model, replica.link, speed.limit_s)
        else:
            await asyncio.sleep(pause_s)
            gap_s = speed.gap_s
        speed.times, speed.next_probe = min(speed.times + 1, 10), time.monotonic() + pause_s
        speed.confirmed = gap_s is not None and gap_s >= speed.limit_s and model.probe in _PROBED
        if gap_s is None or gap_s < speed.limit_s:
            self._returns(replica, speed, speed.next_probe)

    def _returns(self, replica: Replica, speed: StreamPace, not_before: float) -> None:
        """Back in the rotation; it does not leave it again for the same reason before that time."""
        if not replica.slow:
            return
        replica.slow, speed.slow_since, speed.next_probe = False, None, not_before
        speed.begun = {}
        speed.ticks.clear()
        if replica.up:  # else it failed requests meanwhile, and its health checks say when it is back
            self._say(f"{replica.link.settings.url} gets requests")

    def _peers_gap_s(self, model: ModelSettings, replica: Replica) -> float | None:
        """Median (of two the less) over the model's other replicas that have streams and are not slow."""
        peers = [self._paces[each] for each in self._others(model, replica)]
        gaps = [speed.gap_s for speed in peers if speed.gap_s is not None]
        return median_low(gaps) if gaps else None

    def _has_other(self, model: ModelSettings, replica: Replica) -> bool:
        return any(each.up and not each.drained and not each.canary for each in self._others(model, replica))

    def _others(self, model: ModelSettings, replica: Replica) -> list[Replica]:
        replicas = self._models.find(model.name)[1].replicas
        return [each for each in replicas if each is not replica and not each.slow]
