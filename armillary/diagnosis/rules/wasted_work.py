"""Rules on work that leads to nothing: skipped updates, tokens without an expert, memory in pieces.

Each is a fact that the trainer counts; none is seen in the time of a step.
"""

from statistics import median

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever, Rule
from armillary.diagnosis.evidence.thresholds import (
    DROPPED_TOKEN_SHARE,
    FRAGMENTED_SHARE,
    MEMORY_FULL_SHARE,
    MIN_TIMED,
    QUALITY_SHARE,
    SKIPPED_STEP_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan
from armillary.units import bytes_text


def skipped_steps(reading: Reading, plan: Plan | None) -> Finding | None:
    """Updates are skipped because of non-finite gradients or spikes: their steps were computed for nothing."""
    skipped = reading.series("skipped_steps_total")
    if len(skipped) < MIN_TIMED:
        return None
    count, share = skipped[-1] - skipped[0], (skipped[-1] - skipped[0]) / (len(skipped) - 1)
    if share < SKIPPED_STEP_SHARE:
        return None
    halves = plan is not None and plan.layout.precision == "fp16"
    lever = Lever(
        title="train in bf16, whose range needs no loss scale" if halves else "find what makes gradients overflow",
        change={"layout.precision": "bf16"} if halves else {},
        action="" if halves else "lower train.lr or train.clip, and look at the batches of the skipped steps",
        speedup=1 / (1 - min(share, 0.99)),
        of="tokens_per_s",
        basis="the steps that were skipped",
        risk="fewer digits than fp16" if halves else "",
    )
    return Finding(
        loop="training",
        cause="skipped_steps",
        rule="skipped_steps",
        share=share,
        evidence=(
            Evidence(
                gauge="skipped_steps_total", value=count, expected=0.0, against="a run whose gradients are finite"
            ),
        ),
        levers=(lever,),
        says=f"{count:.0f} of {len(skipped) - 1:,} steps changed no weight ({share:.0%}): their gradients were not "
        "finite, or they were spikes",
    )


def dropped_tokens(reading: Reading, plan: Plan | None) -> Finding | None:
    """Experts are full and tokens pass them by: the model that is trained is not the one that was asked for."""
    dropped = reading.series("expert_drop_fraction")
    dropping = median(dropped[len(dropped) // 2 :]) if dropped else 0.0
    if dropping < DROPPED_TOKEN_SHARE:
        return None
    capacity = plan.train.expert_capacity if plan is not None and plan.train is not None else None
    lever = Lever(
        title="room for every token",
        change={"train.expert_capacity": None} if capacity is not None else {},
        action="" if capacity is not None else "raise the capacity of experts",
        speedup=1 / (1 - min(dropping, 0.99)),
        of="expert_drop_fraction",
        basis="tokens that reach their experts",
        risk="the busiest expert decides the time of a layer",
    )
    return Finding(
        loop="training",
        cause="dropped_tokens",
        rule="dropped_tokens",
        share=max(dropping, QUALITY_SHARE),
        evidence=(
            Evidence(
                gauge="expert_drop_fraction",
                value=dropping,
                expected=float(DROPPED_TOKEN_SHARE),
                against="most that does not show in the loss",
            ),
        ),
        levers=(lever,),
        says=f"{dropping:.0%} of the choices find their expert full and are dropped"
        + (f" at a capacity of {capacity:g}" if capacity is not None else ""),
    )


def fragmentation(reading: Reading, plan: Plan | None) -> Finding | None:
    """The allocator holds nearly all of the device in pieces that the run does not use."""
    reserved, used = reading.get("memory_reserved_bytes"), reading.get("memory_peak_bytes")
    capacity = plan.cluster.chip.memory_bytes if plan is not None else None
    if not reserved or not used or not capacity or (plan is not None and plan.cluster.chip.kind == "cpu"):
        return None
    unused = (reserved - used) / reserved
    if reserved / capacity < MEMORY_FULL_SHARE or unused < FRAGMENTED_SHARE:
        return None
    lever = Lever(
        title="let segments of the allocator grow",
        action="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        speedup=reserved / used,
        of="memory_reserved_bytes",
        basis="what is allocated at the peak",
    )
    return Finding(
        loop="training",
        cause="fragmentation",
        rule="fragmentation",
        share=QUALITY_SHARE,
        evidence=(
            Evidence(gauge="memory_reserved_bytes", value=reserved, expected=capacity, against="the device's memory"),
            Evidence(gauge="memory_peak_bytes", value=used),
        ),
        levers=(lever,),
        says=f"{bytes_text(reserved)} are reserved and at most {bytes_text(used)} used: free memory is in pieces that "
        "nothing fits into, and a longer batch ends the run",
    )


RULES: tuple[Rule, ...] = (skipped_steps, dropped_tokens, fragmentation)
