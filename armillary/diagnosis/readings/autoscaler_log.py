"""The decisions.jsonl of an autoscaler as a Reading: replicas that ran, replicas needed, and waiting.

A decision holds from its time to that of the next. What the traffic needed is the largest need of that decision's
signals, rounded up as the autoscaler rounds, and at least one replica while there are requests. What a backlog asks for
does not count there: it is what a shortage left, hundreds of replicas for a moment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean

from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadData
from armillary.fleet.autoscale.decision_log import AutoscalerStart, Line, Logged, read_log
from armillary.spec.tables.fleet import Autoscale
from armillary.stats import percentile

AUTOSCALER = "autoscaler"
"""Reading.by"""
_ROUNDING = 0.05
"""need a little above a whole number of replicas that starts none (fleet/autoscale/policy.py)"""
_BACKLOG = ("in flight", "waiting")
"""signals that grow with the queue"""
_GAP_INTERVALS = 3.0
"""a decision holds for so many intervals at most: later, the autoscaler did not run"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """What held from one decision to the next."""

    seconds: float
    logged: Logged
    target: float
    """share of a replica's capacity at which it is meant to run: a need has that headroom in it"""

    @property
    def need(self) -> float:
        """Replicas that the traffic takes, with their fraction."""
        needs = self.logged.decision.needs.items()
        return max((value for name, value in needs if name not in _BACKLOG), default=0.0)

    @property
    def needed(self) -> int:
        signals = self.logged.signals
        asked = bool(signals.arrived_per_s or signals.in_flight or signals.waiting)
        return max(ceil(self.need - _ROUNDING), int(asked))

    @property
    def requests(self) -> float:
        return self.logged.signals.arrived_per_s * self.seconds

    @property
    def full(self) -> float:
        """Replicas that the traffic would fill: with fewer, requests wait."""
        return self.need * self.target

    @property
    def is_short(self) -> bool:
        return self.logged.signals.ready < self.full


def is_autoscaler_log(head: str) -> bool:
    """Whether a file begins with an autoscaler's policy."""
    try:
        first = json.loads(head.lstrip().split("\n", 1)[0])
    except ValueError:
        return False
    return isinstance(first, dict) and {"settings", "limits"} <= first.keys()


def read_autoscaler_log(path: Path) -> Reading:
    """What a service had and needed, weighted by time, and by requests where requests wait."""
    lines = read_log(path)
    begun = [line for line in lines if isinstance(line, AutoscalerStart)]
    if not begun:
        raise BadData(f"{path} has decisions but no policy; give the whole decisions.jsonl")
    settings, spans = begun[-1].settings, spans_of(lines, begun[-1].settings)
    starts = [line.started_s for line in lines if isinstance(line, Logged) and line.started_s is not None]
    values = _figures(spans, settings.max_replicas) | ({"replica_start_s": fmean(starts)} if starts else {})
    if begun[-1].limits.usd_per_hour:
        values["replica_hour_usd"] = begun[-1].limits.usd_per_hour
    hours = sum(span.seconds for span in spans) / 3600
    return Reading(
        source=str(path),
        kind="serving",
        by=AUTOSCALER,
        values=values,
        settings={name: f"{getattr(settings, name)}" for name in ("min_replicas", "max_replicas", "target")},
        notes=(
            f"{len(spans)} decisions over {hours:.1f} hours; what replicas do inside is on their own metrics pages",
        ),
    )


def spans_of(lines: Sequence[Line], settings: Autoscale) -> list[Span]:
    """Each decision with how long it held; clocks of two processes do not compare, and the last one has no next."""
    spans = []
    for line, following in pairwise(lines):
        if isinstance(line, Logged) and isinstance(following, Logged):
            seconds = min(following.signals.now - line.signals.now, _GAP_INTERVALS * settings.interval_s)
            if seconds > 0:
                spans.append(Span(seconds=seconds, logged=line, target=settings.target))
    return spans


def _figures(spans: Sequence[Span], most: int | None) -> dict[str, float]:
    seconds, requests = sum(span.seconds for span in spans), sum(span.requests for span in spans)
    if not seconds:
        return {}
    starting = [span for span in spans if span.is_short and span.logged.signals.starting]
    at_most = [span for span in spans if most and span.full > most and span.logged.signals.replicas >= most]
    values = {
        "replicas": sum(span.logged.signals.replicas * span.seconds for span in spans) / seconds,
        "replicas_needed": sum(span.needed * span.seconds for span in spans) / seconds,
        "replicas_needed_p95": percentile([span.need for span in spans], 95),
        "requests_per_s": requests / seconds,
        "requests_per_s_p95": percentile([span.logged.signals.arrived_per_s for span in spans], 95),
    }
    if requests:
        values["short_starting_fraction"] = sum(span.requests for span in starting) / requests
        values["short_at_most_fraction"] = sum(span.requests for span in at_most) / requests
        values["replicas_wanted"] = float(max((span.needed for span in at_most), default=0))
    return values
