"""Levers of training: the changes that act on each cause, priced by the planner on the measured step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from armillary.diagnosis.evidence.finding import Cause, Finding, Lever
from armillary.diagnosis.evidence.thresholds import (
    BALANCED_EXPERT_LOAD,
    GRADIENT_BUCKET_RATIO,
    LARGER_BATCH_SHARE,
    MIN_FREED_SHARE,
    STALL_TARGET_SHARE,
)
from armillary.diagnosis.levers.advice import max_workers, read_ahead, workers
from armillary.diagnosis.levers.training_price import Priced, Pricing
from armillary.diagnosis.readings.reading import Reading
from armillary.planning.cost.measured_failures import measured_failures
from armillary.profiling.analysis.amdahl import speedup
from armillary.profiling.dtypes.rates import cluster_rates, run_shape
from armillary.spec.precision import SIXTEEN_BIT
from armillary.store.home import Home
from armillary.units import bytes_text

PLANNER = "planner, on the measured parts of a step"
AMDAHL = "Amdahl over the measured parts of a step"
_Levers = Callable[[Finding, Pricing], Iterator[Lever]]


def levers_for(finding: Finding, reading: Reading, home: Home) -> tuple[Lever, ...]:
    """Against one finding in a reading with a plan for training, best first."""
    make = _AGAINST.get(finding.cause)
    levers = make(finding, Pricing(reading, home)) if make is not None else ()
    return tuple(sorted(levers, key=lambda lever: -lever.speedup))


def _lever(priced: Priced | None, title: str, *, risk: str = "", basis: str = PLANNER) -> Iterator[Lever]:
    if priced is not None:
        yield Lever(title=title, change=priced.change, speedup=priced.speedup, risk=risk or priced.risk, basis=basis)


# --- inner loop


def _workers(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """More loader workers; a prefetching loader that is still late takes a whole step per batch."""
    parts, data = pricing.parts, pricing.plan.data
    if parts is None or data is None:
        yield from read_ahead(finding, pricing.reading)
        return
    now, most = max(1, data.workers), max_workers(pricing.plan)
    busy = max(1e-9, parts.step - parts.data_wait)
    count = max(workers(parts.step, busy, now, most), min(most, now + 1))
    if count > data.workers:
        yield from _lever(
            pricing.price_parts({"data.workers": count}, data_wait=max(0.0, parts.step * now / count - busy)),
            f"loader workers {data.workers} → {count}",
            basis=f"at most, with cores to spare: {AMDAHL}",
            risk="a core and a copy of the reader each",
        )


def _micro_batches(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """Fewer, larger micro-batches: the same tokens in fewer launches. A smaller one that comes within a hundredth of
    the fastest takes less memory."""
    size, job = pricing.plan.layout.micro_batch, pricing.job
    rows = job.batch_tokens // job.sequence // pricing.plan.layout.dp
    sizes = (size * times for times in (2, 4, 8, 16, 32) if rows % (size * times) == 0)
    candidates = _micro_batch_prices(pricing, sizes)
    best = max((candidate.speedup for candidate in candidates), default=0.0)
    for priced in [candidate for candidate in candidates if candidate.speedup >= 0.99 * best][:1]:
        yield from _lever(priced, f"micro-batch {size} → {priced.change['layout.micro_batch']}")


def _micro_batch_prices(pricing: Pricing, sizes: Iterable[int]) -> list[Priced]:
    return [priced for size in sizes if (priced := pricing.price({"layout.micro_batch": size})) is not None]


def _other_width(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """16 bits for a wide dtype, fp32 for one of 16 bits: the device's ceilings say which of them is faster; where none
    were measured, a probe says where 16 bits are slower."""
    plan, job = pricing.plan, pricing.job
    if plan.layout.precision in SIXTEEN_BIT:
        yield from _lever(pricing.price({"layout.precision": "fp32"}), "GEMMs in fp32", risk="activations take twice")
        return
    shape = run_shape(plan.model, rows=plan.layout.micro_batch * job.sequence // plan.layout.cp, keys=job.sequence)
    if (cluster_rates(pricing.home, plan.cluster, shape).speedup("bf16") or 1.0) >= 1:
        yield from _lever(
            pricing.price({"layout.precision": "bf16"}),
            "GEMMs in bf16",
            risk="GEMMs lose digits; weights and sums stay in fp32",
        )


def _off_the_host(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    yield Lever(
        title="take the host's work out of the step",
        speedup=speedup(min(0.99, finding.share), float("inf")),
        action="armillary profile names the line: read values later, log less often, move work to a process",
        basis=AMDAHL,
    )


def _computing(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """Blocks of our own kernels have little left to fuse."""
    yield from _micro_batches(finding, pricing)
    if pricing.may_compile:
        yield from _lever(
            pricing.fused({"train.compile": True}), "compile the blocks", risk="the first step takes a minute or more"
        )


# --- training loop


def _communicate_less(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """Layouts that communicate less: data instead of tensor parallelism, unsharded weights."""
    layout = pricing.plan.layout
    if layout.tp > 1:
        for tp in {1, layout.tp // 2}:
            change = {"layout.tp": tp, "layout.dp": layout.dp * layout.tp // tp}
            yield from _lever(pricing.price(change), f"tp {layout.tp} → {tp}, dp {layout.dp} → {change['layout.dp']}")
    for zero in range(layout.zero) if layout.dp > 1 else ():
        yield from _lever(pricing.price({"layout.zero": zero}), f"zero {layout.zero} → {zero}")
    if layout.cp > 1:
        change = {"layout.cp": 1, "layout.dp": layout.dp * layout.cp}
        yield from _lever(pricing.price(change), f"cp {layout.cp} → 1, dp {layout.dp} → {change['layout.dp']}")
    if layout.ep > 1:
        yield from _lever(pricing.price({"layout.ep": 1}), f"ep {layout.ep} → 1")
    if layout.zero >= 2:
        yield from _micro_batches(finding, pricing)
    if layout.dp > 1:
        yield from _sum_gradients(finding, pricing)


def _sum_gradients(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """Gradients are summed once per step: in smaller buckets beside the backward pass, or after twice the tokens."""
    layout, now = pricing.plan.layout, pricing.job.batch_tokens
    bucket = layout.bucket_bytes // GRADIENT_BUCKET_RATIO
    if layout.zero == 0 and bucket:
        yield from _lever(
            pricing.price({"layout.bucket_bytes": bucket}),
            f"gradients in pieces of {bytes_text(layout.bucket_bytes)} → {bytes_text(bucket)}",
        )
    priced = pricing.price({"train.batch_tokens": 2 * now}) if finding.share >= LARGER_BATCH_SHARE else None
    if priced is not None:
        yield Lever(
            title=f"sum gradients after {now:,} → {2 * now:,} tokens",
            change=priced.change,
            speedup=2 * priced.speedup,
            of="tokens_per_s",
            basis=PLANNER,
            risk="half as many updates from the same tokens: look at the learning rate",
        )


def _fill_the_pipe(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    layout = pricing.plan.layout
    size = layout.micro_batch
    smaller = _micro_batch_prices(pricing, (number for number in range(1, size) if size % number == 0))
    for priced in sorted(smaller, key=lambda candidate: -candidate.speedup)[:1]:
        yield from _lever(priced, f"micro-batch {size} → {priced.change['layout.micro_batch']}, so more of them")
    if layout.schedule != "zero_bubble":
        yield from _lever(pricing.price({"layout.schedule": "zero_bubble"}), "zero-bubble schedule")
    if layout.interleave == 1:
        change = {"layout.schedule": "interleaved", "layout.interleave": 2}
        yield from _lever(pricing.price(change), "two chunks of layers per stage")
    flat: dict[str, object] = {"layout.pp": 1, "layout.dp": layout.dp * layout.pp}
    flat |= {"layout.schedule": "1f1b"} if layout.schedule != "1f1b" else {}
    flat |= {"layout.interleave": 1} if layout.interleave > 1 else {}
    yield from _lever(pricing.price(flat), f"pp {layout.pp} → 1, dp {layout.dp} → {flat['layout.dp']}")


def _replace_rank(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    rank = int(_value_of(finding, "slowest_rank", 0))
    yield Lever(
        title=f"look at rank {rank}",
        speedup=speedup(min(0.99, finding.share), float("inf")),
        basis=AMDAHL,
        action=f"see what else runs beside rank {rank}, its clock and its links; take the machine out if it stays slow",
    )


def _value_of(finding: Finding, gauge: str, default: float) -> float:
    return next((evidence.value for evidence in finding.evidence if evidence.gauge == gauge), default)


def _save_activations(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    now = pricing.plan.layout.recompute
    for less in {"full": ("none", "selective"), "selective": ("none",), "none": ()}[now]:
        yield from _lever(pricing.price({"layout.recompute": less}), f"recompute {now} → {less}")


def _end_offload(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    change = {"layout.offload": "none"}
    yield from _lever(pricing.without_offload(change), f"offload {pricing.plan.layout.offload} → none")


def _free_memory(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """Changes that free memory, at the price of time."""
    layout, peak = pricing.plan.layout, pricing.peak_bytes
    half, zero = layout.micro_batch // 2, min(3, layout.zero + 1)
    changes: dict[str, Mapping[str, Any]] = {
        "recompute none → selective": {"layout.recompute": "selective"} if layout.recompute == "none" else {},
        f"micro-batch {layout.micro_batch} → {half}": {"layout.micro_batch": half},
        f"zero {layout.zero} → {zero}": {"layout.zero": zero},
        "recompute whole layers": {"layout.recompute": "full"},
        "optimiser states on the host": {"layout.offload": "optimizer"},
    }
    for title, change in changes.items():
        priced = pricing.price(change) if change else None
        if priced is not None and priced.memory_bytes <= -MIN_FREED_SHARE * peak:
            yield Lever(
                title=title,
                change=change,
                speedup=peak / (peak + priced.memory_bytes),
                of="memory_peak_bytes",
                risk=f"a step takes {1 / priced.speedup:.2f} times as long" if priced.speedup < 0.995 else "none",
                basis="planner",
            )


def _balance(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """What balancing brings the busiest expert's load down to; where experts lie on several ranks that is time."""
    moe, job = pricing.plan.model.moe, pricing.job
    change: dict[str, object] = {}
    if moe is not None:
        weight = moe.aux_loss if job.balance_loss is None else job.balance_loss
        change = (
            {"train.balance_loss": max(0.01, 10 * weight)}
            if weight < 0.1
            else {"train.expert_capacity": float(BALANCED_EXPERT_LOAD)}
        )
    gauge = "expert_load_max_over_mean"
    least = min([BALANCED_EXPERT_LOAD, *pricing.reading.series(gauge)])
    yield Lever(
        title="balance the experts",
        change=change,
        speedup=max(1.0, _value_of(finding, gauge, 1.0) / max(1.0, least)),
        of=gauge,
        basis="the load that balanced routers come to, or this run's own best",
        action="" if change else "raise the weight of the balance loss",
        risk="the loss has one more term",
    )


def _save_less(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    interval, risk = pricing.job.save_every, "a failure costs up to {} steps"
    return _less_often(pricing, "checkpoint", "checkpoints", "train.save_every", interval, risk)


def _validate_less(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    interval, risk = pricing.job.eval_every, "the validation loss is seen less often"
    return _less_often(pricing, "validation", "validation", "train.eval_every", interval, risk)


def _save_in_time(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """At the interval that the run's own failures and checkpoints suggest, where that is worth it."""
    account, step_s = pricing.reading.goodput, pricing.reading.get("step_s")
    measured = measured_failures(account) if account is not None else None
    if measured is None or not step_s:
        return
    steps = max(1, round(measured.best.interval_s / step_s))
    yield Lever(
        title=f"a checkpoint every {steps:,} steps, the best interval for these failures",
        change={"train.save_every": steps},
        speedup=max(1.0, measured.best.goodput_fraction / measured.as_run.goodput_fraction),
        of="goodput_fraction",
        basis="Daly's goodput with the failure rate, checkpoint and restart times of this run",
        risk="a few failures are a rough rate",
    )


def _less_often(
    pricing: Pricing, part: str, activity: str, key: str, interval: int | None, risk: str
) -> Iterator[Lever]:
    """At a round interval (1, 2 or 5 times a power of ten), at least twice what it was."""
    if pricing.parts is None or interval is None:
        return
    seconds: float = getattr(pricing.parts, part)
    least = max(interval * pricing.parts.share(seconds) / STALL_TARGET_SHARE, 2.0 * interval)
    power = 10 ** (len(str(int(least))) - 1)
    longer = next(power * times for times in (1, 2, 5, 10, 20) if power * times >= 0.99 * least)
    yield from _lever(
        pricing.price_parts({key: longer}, **{part: seconds * interval / longer}),
        f"{activity} every {interval} → {longer} steps",
        basis=AMDAHL,
        risk=risk.format(longer),
    )


_AGAINST: dict[Cause, _Levers] = {
    "data_starvation": _workers,
    "launch_overhead": _computing,
    "sync": _off_the_host,
    "precision": _other_width,
    "compute": _computing,
    "memory_bandwidth": _computing,
    "exposed_communication": _communicate_less,
    "bubble": _fill_the_pipe,
    "straggler": _replace_rank,
    "needless_recompute": _save_activations,
    "needless_offload": _end_offload,
    "memory_pressure": _free_memory,
    "expert_imbalance": _balance,
    "checkpoint_stall": _save_less,
    "validation_stall": _validate_less,
    "failures": _save_in_time,
}
