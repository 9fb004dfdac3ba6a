"""What rules about a queue share: how much of it a cause explains, and the figures that show it."""

from __future__ import annotations

from armillary.diagnosis.evidence.finding import Evidence
from armillary.diagnosis.evidence.serving_run import Service
from armillary.diagnosis.evidence.thresholds import (
    QUEUE_CLEARING_SHARE,
)
from armillary.diagnosis.readings.reading import Reading


def with_queue(here: Service, saved: float) -> float:
    """The share of a cause that saves so much of the steps' time: where that is a good part, and as much as was too
    much, the queue goes with it."""
    return saved if here.batch_job or saved < max(QUEUE_CLEARING_SHARE, here.excess) else max(saved, here.queue_share)


def prompt_of_ttft(here: Service) -> float:
    """Share of the time to first token in which the prompt was computed."""
    known = [one for one in here.reading.requests if "ttft_s" in one and "prefill_s" in one]
    whole = sum(float(one["ttft_s"]) for one in known)
    return sum(float(one["prefill_s"]) for one in known) / whole if whole else 0.0


def mean_of(reading: Reading, gauge: str) -> float:
    found = [value for value in reading.series(gauge) if value]
    return sum(found) / len(found) if found else 0.0


def waiting(here: Service) -> Evidence:
    return Evidence(gauge="waiting", value=mean_of(here.reading, "waiting"), expected=0.0, against="nobody waits")


def queue(here: Service) -> Evidence:
    return Evidence(
        gauge="queue_p50_s",
        value=here.reading.get("queue_p50_s") or 0.0,
        expected=here.reading.get("e2e_p50_s"),
        against="the whole time of a request",
    )


def blocks(here: Service) -> Evidence:
    values = [float(one["kv_used_fraction"]) for one in here.queued or here.reading.steps if "kv_used_fraction" in one]
    return Evidence(
        gauge="kv_used_fraction", value=sum(values) / len(values) if values else 0.0, expected=1.0, against="all blocks"
    )
