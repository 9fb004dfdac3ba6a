"""What rules about a queue share: how much of it a cause explains, and the figures that show it."""

from __future__ import annotations

from armillary.diagnosis.evidence.finding import Evidence
from armillary.diagnosis.evidence.serving_run import Service
from armillary.diagnosis.readings.reading import Reading

WAITS = 0.1
"""of the time in steps, or of a request's time: below it a queue is the chance of arrivals, not a cause"""
CROWDED = 0.25
"""of both: a server that is well used has short queues now and then, one that cannot keep up has them all along"""
EXPLAINS = 0.15
"""of the time in steps: a server that is so much quicker may not have the queue; one that is less so still has it"""
GAINS = 0.05
"""of the time: what would save less is not worth a line"""


def with_queue(here: Service, saved: float) -> float:
    """The share of a cause that saves so much of the steps' time: where that is a good part, and as much as was too
    much, the queue goes with it."""
    return saved if here.batch_job or saved < max(EXPLAINS, here.excess) else max(saved, here.queue_share)


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
