"""The parts of a training step by the wall clock, in seconds per step, with everything between steps included.

A median hides a loader that is late every fourth step, and one hiccup of a busy machine dominates a mean. So each part
is a winsorised mean: values above the 90th percentile count as the 90th percentile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from armillary.diagnosis.evidence.thresholds import MAX_LAUNCH_SHARE, MAX_REMOVABLE_SHARE, WINSORISE_ABOVE
from armillary.diagnosis.readings.reading import Reading
from armillary.planning.device_model.efficiency import AUTOGRAD_CALL, TORCH_CALL_S
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.plan import Plan
from armillary.store.gauges import Record


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one step, and its share of what is done only every n steps. `data_wait`, `comm_exposed` and `bubble`
    are parts of `step`; `checkpoint`, `validation` and `between` come on top of it."""

    step: float
    data_wait: float = 0.0
    comm_exposed: float = 0.0
    bubble: float = 0.0
    checkpoint: float = 0.0
    validation: float = 0.0
    between: float = 0.0

    @property
    def total(self) -> float:
        """What one step costs the run."""
        return self.step + self.checkpoint + self.validation + self.between

    @property
    def work(self) -> float:
        """Of the step, what is neither waiting nor idling."""
        return max(0.0, self.step - self.data_wait - self.comm_exposed - self.bubble)

    def share(self, seconds: float) -> float:
        return min(1.0, max(0.0, seconds) / self.total) if self.total else 0.0


def parts_of(reading: Reading) -> Parts | None:
    """None where no step was timed."""
    step = winsorised_mean(reading.series("step_s")) or reading.get("step_s")
    if not step:
        return None
    job = reading.plan.train if reading.plan else None
    waits = {
        name: min(step, reading.values.get(f"{name}_s", winsorised_mean(reading.series(f"{name}_s"))))
        for name in ("data_wait", "comm_exposed", "bubble")
    }
    return Parts(
        step=step,
        checkpoint=_saves(reading, job.save_every if job else 0),
        validation=amortised(reading, "validation_s", job.eval_every if job else 0),
        between=winsorised_mean(reading.series("between_steps_s")),
        **waits,
    )


def _saves(reading: Reading, period: int | None) -> float:
    """Seconds of checkpoints per step: every `period` steps, or, where the trainer chose when (None), all but the
    last one over all steps. One that is written while training continues is noted at a later step than its own."""
    if period is not None:
        later = [record["checkpoint_stall_s"] for record in reading.steps[:-1] if "checkpoint_stall_s" in record]
        return median(later) / period if period and later else amortised(reading, "checkpoint_stall_s", period)
    stalls = [record.get("checkpoint_stall_s", 0.0) for record in reading.steps[:-1]]
    return float(sum(stalls)) / len(reading.steps) if stalls else 0.0


def amortised(reading: Reading, gauge: str, period: int) -> float:
    """Seconds per step of what is done every `period` steps; what happens once at the end of a run is left out."""
    if not period:
        return 0.0
    timed = [(int(record.get("step", -1)) + 1, float(record[gauge])) for record in reading.steps if gauge in record]
    regular = [seconds for step, seconds in timed if step % period == 0]
    return median(regular) / period if regular else 0.0


def winsorised_mean(values: Sequence[float]) -> float:
    """The mean with values above the 90th percentile lowered to it; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    cap = ordered[int(WINSORISE_ABOVE * (len(ordered) - 1))]
    return sum(min(value, cap) for value in ordered) / len(ordered)


def recompute_share(reading: Reading) -> float | None:
    """Share of a step spent in recompute: within each step that measured it, since step times vary over a run."""
    timed = [(float(record["recompute_s"]), _length(record)) for record in reading.steps if "recompute_s" in record]
    shares = [min(1.0, seconds / step_s) for seconds, step_s in timed if step_s > 0]
    return median(shares) if shares else None


def _length(record: Record) -> float:
    """Seconds of one step: of a recorded one, its parts."""
    parts = sum(float(record.get(name, 0.0)) for name in ("compute_s", "comm_exposed_s", "bubble_s", "overhead_s"))
    return parts if "compute_s" in record else float(record.get("step_s", 0.0))


def computing(reading: Reading) -> float:
    """Share of the time that a recorded step stands for: all but waiting for data and the time between steps."""
    parts = parts_of(reading)
    return parts.share(parts.step - parts.data_wait) if parts is not None else 1.0


def without(share: float) -> float:
    """Speed-up if a share of the time went."""
    return speedup(min(MAX_REMOVABLE_SHARE, max(0.0, share)), inf)


def launch_overhead_share(reading: Reading, plan: Plan | None) -> float | None:
    """Share of a step without its waiting that follows the number of operations rather than their work; None where no
    step was recorded. On a GPU the device idles until a launch comes, or runs kernels too short for any roofline. On a
    CPU every operator pays for its call, and cores vary in speed: calls are compared with steps of the same moment."""
    gaps = reading.get("launch_gap_fraction")
    if gaps is None:
        return None
    seen = gaps + (reading.get("launch_bound_fraction") or 0.0)
    calls, ran = reading.get("kernels"), reading.get("host_cpu_s")
    if plan is None or plan.cluster.chip.kind != "cpu" or not calls or not ran:
        return min(MAX_LAUNCH_SHARE, seen)
    shares = [
        calls * float(record["torch_call_s"]) / float(record["host_cpu_s"])
        for record in reading.steps
        if "torch_call_s" in record and record.get("host_cpu_s")
    ]
    # a run measures torch_call_s once, before its first step; older ones measured it beside several
    once = calls * (reading.get("torch_call_s") or TORCH_CALL_S * AUTOGRAD_CALL) / ran
    return min(MAX_LAUNCH_SHARE, median(shares) if len(shares) > 1 else once)


def micro_batch_overhead_share(reading: Reading) -> float | None:
    """Fixed cost of the micro-batches as a share of a step without its waiting: the trainer's last measurement of the
    passes; the optimizer has none. None where the trainer could not measure it."""
    fractions = reading.series("micro_batch_overhead_fraction")
    if not fractions:
        return None
    steps = [
        (float(record["optimizer_s"]), float(record["step_s"]) - float(record.get("data_wait_s", 0.0)))
        for record in reading.steps
        if record.get("step_s") and "optimizer_s" in record
    ]
    optimizer = [optimizer_s / step_s for optimizer_s, step_s in steps if step_s > 0]
    return min(MAX_LAUNCH_SHARE, fractions[-1] * max(0.0, 1 - (median(optimizer) if optimizer else 0.0)))
