"""Rule: a plain function of what was measured and what was planned; and the limits that several of them hold.

Runs of our own and logs of other programs are judged alike, so what is usual is written once.
"""

from __future__ import annotations

from collections.abc import Callable

from armillary.diagnosis.evidence.finding import Finding
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan

Rule = Callable[[Reading, Plan | None], Finding | None]
"""rule(reading, plan) -> a cause, or None where there is none"""

IDLE_STAGES = 0.08
"""share of pipeline idle time that a few more micro-batches would not bring below"""
STALLS = 0.04
"""share of the time in checkpoints or validations, where a few hundredths are usual"""
CALM = 0.01
"""share of the time that checkpoints or validations are brought down to"""
FULL = 0.95
"""share of a device's memory beyond which the allocator has to search, and a longer batch fails"""
WORTH = 1.05
"""predicted speed-up from which a lever is worth pulling, and a cause worth naming: less is within what runs differ"""
