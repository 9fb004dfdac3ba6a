"""Runs of one job at several sizes: where tokens/s per device drop, and which part of a step takes what is lost.

A device's time per token is split into the measured parts of a step. Between two sizes the part that grew most is the
reason; a size that no longer fits into one fast domain (a node, a rack) is named as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from armillary.diagnosis.evidence.step_parts import parts_of
from armillary.diagnosis.evidence.thresholds import SCALING_LOSS_SHARE
from armillary.diagnosis.readings.log_lines import number
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadInput

PARTS = {
    "work": "the work itself",
    "comm_exposed": "communication that nothing hides",
    "bubble": "pipeline bubbles",
    "data_wait": "waiting for data",
    "checkpoint": "checkpoints",
    "validation": "validation",
    "between": "the time between steps",
}


@dataclass(frozen=True, kw_only=True)
class SizedRun:
    """One run as a size of the job."""

    source: str
    devices: int
    tokens_per_s_per_device: float
    domain: int | None
    """devices that its fastest links connect; None where nobody said"""
    seconds_per_token: dict[str, float]
    """a device's time per token, by PARTS"""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Two neighbouring sizes between which the speed per device drops."""

    before: SizedRun
    after: SizedRun
    part: str
    """that grew most"""

    @property
    def loss(self) -> float:
        """Share of the speed per device that is lost."""
        return 1 - self.after.tokens_per_s_per_device / self.before.tokens_per_s_per_device

    @property
    def part_share(self) -> float:
        """Of the time per token that was added, what this part took."""
        added = 1 / self.after.tokens_per_s_per_device - 1 / self.before.tokens_per_s_per_device
        return min(1.0, (self.after.seconds_per_token[self.part] - self.before.seconds_per_token[self.part]) / added)

    @property
    def says(self) -> str:
        text = (
            f"from {self.before.devices} to {self.after.devices} devices tokens/s per device drop by {self.loss:.0%}: "
            f"{PARTS[self.part]} takes {self.part_share:.0%} of the time that is added"
        )
        domain = self.after.domain
        if domain is not None and self.before.devices <= domain < self.after.devices:
            text += f"; {self.after.devices} devices no longer fit into one domain of {domain}"
        return text


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """What became of a job as it grew."""

    runs: tuple[SizedRun, ...]
    """by size"""
    boundary: Boundary | None
    """where the speed per device drops most; None where it never drops noticeably"""

    @property
    def says(self) -> str:
        if self.boundary is not None:
            return self.boundary.says
        first, last = self.runs[0], self.runs[-1]
        share = last.tokens_per_s_per_device / first.tokens_per_s_per_device
        return f"{last.devices} devices keep {share:.0%} of the speed per device that {first.devices} have: no boundary"


def compare_sizes(readings: Sequence[Reading]) -> RunSizes:
    """The runs by size, and the steepest drop between two of them."""
    runs = sorted((sized_run(reading) for reading in readings), key=lambda run: run.devices)
    for before, after in pairwise(runs):
        if before.devices == after.devices:
            raise BadInput(
                f"{before.source} and {after.source} both ran on {after.devices} devices; give one of a size"
            )
    drops = [_boundary(before, after) for before, after in pairwise(runs)]
    worst = max(drops, key=lambda drop: drop.loss)
    return RunSizes(runs=tuple(runs), boundary=worst if worst.loss >= SCALING_LOSS_SHARE else None)


def sized_run(reading: Reading) -> SizedRun:
    """A training run with its number of devices and the parts of its time."""
    parts, plan = parts_of(reading), reading.plan
    if reading.kind != "training" or parts is None:
        raise BadInput(f"{reading.source} has no timed training steps; give runs of one training job at several sizes")
    devices = plan.layout.num_devices if plan is not None else _count(reading)
    if devices is None:
        raise BadInput(f"{reading.source} does not say on how many devices it ran; give runs of armillary train")
    rate = _tokens_per_s(reading, devices, parts.total)
    if not rate:
        raise BadInput(f"{reading.source} does not say how many tokens a step has; give runs of armillary train")
    step = {name: getattr(parts, name) for name in PARTS}
    return SizedRun(
        source=reading.source,
        devices=devices,
        tokens_per_s_per_device=rate,
        domain=plan.cluster.fast_domain if plan is not None else None,
        seconds_per_token={name: seconds / parts.total / rate for name, seconds in step.items()},
    )


def _tokens_per_s(reading: Reading, devices: int, seconds: float) -> float | None:
    """Of one device, everything between steps included."""
    batch, job = reading.get("batch_tokens"), reading.plan.train if reading.plan is not None else None
    sequence = number(reading.settings.get("seq_length"))  # Megatron-LM's log counts sequences
    if batch is None and job is not None:
        batch = float(job.batch_tokens)
    elif batch is None and sequence is not None and (sequences := reading.get("batch")) is not None:
        batch = sequences * sequence
    return batch / seconds / devices if batch else reading.get("tokens_per_s_per_device")


def _count(reading: Reading) -> int | None:
    """Devices that another program's log names: Megatron-LM's world_size, torchtitan's mesh."""
    text = reading.settings.get("world_size") or reading.settings.get("mesh_sizes") or ""
    sizes = [int(size) for size in re.findall(r"\b\d+\b", text)]
    return prod(sizes) if sizes and min(sizes) > 0 else None


def _boundary(before: SizedRun, after: SizedRun) -> Boundary:
    grown = {name: after.seconds_per_token[name] - before.seconds_per_token[name] for name in PARTS}
    return Boundary(before=before, after=after, part=max(grown, key=lambda name: grown[name]))
