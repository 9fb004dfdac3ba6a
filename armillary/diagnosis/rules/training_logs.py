"""Rules for training logs of other programs; each brings its levers as that program's own flags.

They do not fire on our own runs, whose records are more exact.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import mean, median

from armillary.diagnosis.evidence.finding import Cause, Evidence, Finding, Lever, Rule
from armillary.diagnosis.evidence.step_parts import without
from armillary.diagnosis.evidence.thresholds import (
    MEMORY_FULL_SHARE,
    MIN_SPIKES,
    MIN_TREND_LINES,
    MIN_TREND_S,
    SLOWDOWN_RATIO,
    SPIKE_RATIO,
    STALL_SHARE,
    STALL_TARGET_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.device import TRACE_RULES
from armillary.diagnosis.rules.training_log_settings import RULES as SETTINGS_RULES
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.plan import Plan
from armillary.units import seconds_text


def saving(reading: Reading, plan: Plan | None) -> Finding | None:
    """Checkpoints whose time the log says."""
    return _stall(reading, "checkpoint_stall_s", "checkpoint_stall", "saving")


def validating(reading: Reading, plan: Plan | None) -> Finding | None:
    """Validations whose time the log says."""
    return _stall(reading, "validation_s", "validation_stall", "validating")


def rhythm(reading: Reading, plan: Plan | None) -> Finding | None:
    """Steps that are much longer at regular intervals: something is done every so often, and the log does not say."""
    timed = _timed(reading)
    if len(timed) < MIN_TREND_LINES or reading.series("checkpoint_stall_s") or reading.series("validation_s"):
        return None  # too few lines, or the log itself says how long saving or validating took
    usual = median(seconds for _, seconds in timed)
    spikes = [(step, seconds) for step, seconds in timed if seconds > SPIKE_RATIO * usual]
    period = _period([step for step, _ in spikes])
    if period is None:
        return None
    each = _steps_per_line(timed)
    share = sum((seconds - usual) * each for _, seconds in spikes) / max(1e-12, sum(s for _, s in timed) * each)
    if share < STALL_SHARE:
        return None
    validated = any("val_loss" in record for record in reading.steps)
    cause: Cause = "validation_stall" if validated else "checkpoint_stall"
    once = mean(seconds - usual for _, seconds in spikes) * each
    what = "validation" if validated else "a checkpoint or a validation"
    longest = Evidence(gauge="step_s", value=max(s for _, s in spikes), expected=usual, against="the usual step")
    says = f"every {period} steps {seconds_text(once)} are lost: {what}"
    return _stalled(reading, cause, share, period, says, longest)


def slowing_down(reading: Reading, plan: Plan | None) -> Finding | None:
    """Steps become longer and longer."""
    timed = _timed(reading)
    if len(timed) < MIN_TREND_LINES or (_run_s(reading) or 0.0) < MIN_TREND_S:
        return None
    third = len(timed) // 3
    first, middle, last = (
        median(seconds for _, seconds in part) for part in (timed[:third], timed[third:-third], timed[-third:])
    )
    if last < SLOWDOWN_RATIO * first or not 0.98 * first <= middle <= 1.02 * last:
        return None
    reserved = reading.series("memory_reserved_bytes")
    fuller = len(reserved) > 1 and reserved[-1] > 1.05 * reserved[0]
    cause: Cause = "memory_pressure" if fuller else "straggler"
    why = "while memory fills" if fuller else "as when a device gets hot or shares its machine"
    action = (
        "find what is kept: armillary profile shows memory over time"
        if fuller
        else "look at clocks and temperature (nvidia-smi -q -d PERFORMANCE), then try another node"
    )
    lever = Lever(
        title="as quick as at the beginning", action=action, speedup=last / first, basis="the log's own beginning"
    )
    share = 1 - first / mean(seconds for _, seconds in timed)
    return Finding(
        loop="training",
        cause=cause,
        rule="slowing_down",
        share=max(0.0, share),
        levers=(lever,),
        evidence=(Evidence(gauge="step_s", value=last, expected=first, against="the beginning"),),
        says=f"steps take {last / first:.2f} times as long as at the beginning, {why}",
    )


def nearly_full(reading: Reading, plan: Plan | None) -> Finding | None:
    """The device's memory is all but taken; where the allocator had to try again, slow steps are its doing."""
    used = max(reading.series("memory_used_fraction"), default=0.0)
    if not _theirs(reading) or used < MEMORY_FULL_SHARE:
        return None
    times, tried = [seconds for _, seconds in _timed(reading)], reading.settings.get("retries", "0")
    lost = 1 - sorted(times)[len(times) // 10] / mean(times) if times and tried != "0" else 0.0
    retried = f", and the allocator had to try again {tried} times" if tried != "0" else ""
    lever = Lever(
        title="leave the allocator some room",
        speedup=without(lost),
        basis="the log's own quickest steps",
        action="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller micro-batch, or recompute",
        risk="recompute takes time",
    )
    return Finding(
        loop="training",
        cause="memory_pressure",
        rule="nearly_full",
        share=max(0.0, lost),
        levers=(lever,),
        evidence=(Evidence(gauge="memory_used_fraction", value=used, expected=MEMORY_FULL_SHARE, against="full"),),
        says=f"{used:.0%} of the device's memory is taken{retried}: a longer batch ends the run",
    )


# --- what the rules share


def _theirs(reading: Reading) -> bool:
    return reading.by not in ("armillary", "")


def _timed(reading: Reading) -> list[tuple[int, float]]:
    """(step, seconds) of every line that has both."""
    if not _theirs(reading):
        return []
    return [(int(record["step"]), float(record["step_s"])) for record in reading.steps if "step_s" in record]


def _steps_per_line(timed: Sequence[tuple[int, float]]) -> float:
    return median(after - before for (before, _), (after, _) in pairwise(timed))


def _period(steps: Sequence[int]) -> int | None:
    """Steps between events that come regularly."""
    gaps = [after - before for before, after in pairwise(steps)]
    if len(steps) < MIN_SPIKES:
        return None
    usual = round(median(gaps))
    even = all(abs(gap - usual * max(1, round(gap / usual))) <= 1 + 0.02 * gap for gap in gaps)
    return usual if even and usual > 1 else None


def _run_s(reading: Reading) -> float | None:
    """How long the lines cover, by the clock or by their steps."""
    if run_s := reading.values.get("run_s"):
        return run_s
    times = [float(record["time"]) for record in reading.steps if "time" in record]
    if len(times) > 1 and times[-1] > times[0]:
        return times[-1] - times[0]
    timed = _timed(reading)
    return sum(seconds for _, seconds in timed) * _steps_per_line(timed) if len(timed) > 1 else None


def _stall(reading: Reading, gauge: str, cause: Cause, activity: str) -> Finding | None:
    stalls = [(int(record["step"]), float(record[gauge])) for record in reading.steps if gauge in record]
    run_s = _run_s(reading) if _theirs(reading) and stalls else None
    if not run_s:
        return None
    share, once = min(0.95, sum(seconds for _, seconds in stalls) / run_s), mean(seconds for _, seconds in stalls)
    if share < STALL_SHARE:
        return None
    period = _period([step for step, _ in stalls])
    often = f"every {period} steps" if period else f"{len(stalls)} times"
    says = f"{activity} takes {seconds_text(once)} {often}: {share:.0%} of the time"
    calm = Evidence(
        gauge=gauge, value=once, expected=STALL_TARGET_SHARE * once / share, against="a hundredth of the time"
    )
    return _stalled(reading, cause, share, period, says, calm)


_FLAGS = {
    ("torchtitan", "checkpoint_stall"): ("--checkpoint.interval={}", "--checkpoint.async_mode=async"),
    ("torchtitan", "validation_stall"): ("--validation.freq={}", ""),
    ("megatron", "checkpoint_stall"): ("--save-interval {}", "--async-save"),
    ("megatron", "validation_stall"): ("--eval-interval {}", ""),
    ("hf-trainer", "checkpoint_stall"): ("save_steps={}", ""),
    ("hf-trainer", "validation_stall"): ("eval_steps={}", ""),
}
"""(writer, cause) -> how often it is done, and how it is done beside the steps"""


def _stalled(reading: Reading, cause: Cause, share: float, period: int | None, says: str, seen: Evidence) -> Finding:
    """Less often, so that it takes a hundredth of the time; or beside the steps."""
    often, in_background = _FLAGS.get((reading.by, cause), ("every {} steps", ""))
    times = ceil(share / STALL_TARGET_SHARE)
    levers = [
        Lever(
            title=f"{times} times less often",
            action=often.format(period * times) if period else f"{times} times less often",
            speedup=speedup(share, times),
            basis="Amdahl over the log's times",
            risk="more to do again after a crash"
            if cause == "checkpoint_stall"
            else "the best moment is seen less exactly",
        )
    ]
    if in_background:
        levers.append(
            Lever(
                title="beside the steps",
                action=in_background,
                speedup=without(share),
                risk="host memory for a copy",
                basis="at most: Amdahl over the log's times",
            )
        )
    return Finding(
        loop="training",
        cause=cause,
        rule=cause,
        share=share,
        evidence=(seen,),
        says=says,
        levers=tuple(sorted(levers, key=lambda lever: -lever.speedup)),
    )


RULES: tuple[Rule, ...] = (saving, validating, rhythm, slowing_down, nearly_full, *SETTINGS_RULES, *TRACE_RULES)
