"""Levers of training: the changes that act on each cause, priced by the planner on the measured step."""

from collections.abc import Callable, Iterator

from armillary.diagnosis.evidence.finding import Cause, Finding, Lever
from armillary.diagnosis.evidence.thresholds import (
    BALANCED_EXPERT_LOAD,
    GRADIENT_BUCKET_RATIO,
    LARGER_BATCH_SHARE,
    MIN_FREED_SHARE,
    STALL_TARGET_SHARE,
)
from armillary.diagnosis.levers.advice import max_workers, read_ahead, workers
from armillary.diagnosis.levers.training_price import Priced, Pricing, pricing_of
from armillary.diagnosis.readings.reading import Reading
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.precision import SIXTEEN_BIT
from armillary.store.home import Home
from armillary.units import bytes_text

PLANNER = "planner, on the measured parts of a step"
AMDAHL = "Amdahl over the measured parts of a step"
_Levers = Callable[[Finding, Reading, "Pricing | None"], Iterator[Lever]]


def levers_for(finding: Finding, reading: Reading, home: Home) -> tuple[Lever, ...]:
    """Against one finding, best first."""
    make = _AGAINST.get(finding.cause)
    if make is None:
        return ()
    levers = list(make(finding, reading, pricing_of(reading, home)))
    return tuple(sorted(levers, key=lambda lever: -lever.speedup))


def _lever(priced: Priced | None, title: str, *, risk: str = "", basis: str = PLANNER) -> Iterator[Lever]:
    if priced is not None:
        yield Lever(title=title, change=priced.change, speedup=priced.speedup, risk=risk or priced.risk, basis=basis)


# --- inner loop


def _workers(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """More loader workers; a prefetching loader that is still late takes a whole step per batch."""
    if pricing is None or pricing.parts is None or pricing.plan.data is None:
        yield from read_ahead(finding, reading)
        return
    parts, now = pricing.parts, max(1, pricing.plan.data.workers)
    busy = max(1e-9, parts.step - parts.data_wait)
    most = max_workers(pricing.plan)
    count = max(workers(parts.step, busy, now, most), min(most, now + 1))
    if count <= pricing.plan.data.workers:
        return
    wait = max(0.0, parts.step * now / count - busy)
    yield from _lever(
        pricing.priced({"data.workers": count}, data_wait=wait),
        f"loader workers {pricing.plan.data.workers} → {count}",
        basis=f"at most, with cores to spare: {AMDAHL}",
        risk="a core and a copy of the reader each",
    )


def _micro_batches(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """Fewer, larger micro-batches: the same tokens in fewer launches."""
    if pricing is None:
        return
    layout, job = pricing.plan.layout, pricing.plan.train
    assert job is not None
    rows = job.batch_tokens // job.sequence // layout.dp
    sizes = [layout.micro_batch * times for times in (2, 4, 8, 16, 32) if rows % (layout.micro_batch * times) == 0]
    candidates = [candidate for size in sizes if (candidate := pricing.price({"layout.micro_batch": size})) is not None]
    for priced in _best(candidates):
        yield from _lever(priced, f"micro-batch {layout.micro_batch} → {priced.change['layout.micro_batch']}")


def _best(candidates: list[Priced]) -> list[Priced]:
    """The quickest; a smaller one that comes within a hundredth of it takes less memory."""
    if not candidates:
        return []
    top = max(candidate.speedup for candidate in candidates)
    return [next(candidate for candidate in candidates if candidate.speedup >= 0.99 * top)]


def _other_width(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """16 bits for a wide dtype, fp32 for one of 16 bits: the device's ceilings say which of them is quicker."""
    if pricing is not None and pricing.plan.layout.precision in SIXTEEN_BIT:
        yield from _lever(pricing.price({"layout.precision": "fp32"}), "GEMMs in fp32", risk="activations take twice")
    elif pricing is not None:
        yield from _lever(
            pricing.price({"layout.precision": "bf16"}),
            "GEMMs in bf16",
            risk="GEMMs lose digits; weights and sums stay in fp32",
        )


def _off_the_host(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    yield Lever(
        title="take the host's work out of the step",
        speedup=speedup(min(0.99, finding.share), float("inf")),
        action="armillary profile names the line: read values later, log less often, move work to a process",
        basis=AMDAHL,
    )


def _computing(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    yield from _micro_batches(finding, reading, pricing)
    yield from _compiled(finding, reading, pricing)


def _compiled(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """Blocks that are kernels of our own have little left to join."""
    if pricing is not None and pricing.may_compile:
        yield from _lever(
            pricing.joined({"train.compile": True}), "compile the blocks", risk="the first step takes a minute or more"
        )


# --- training loop


def _talk_less(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """Layouts that communicate less: data instead of tensor parallelism, unsharded weights."""
    if pricing is None:
        return
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
        yield from _micro_batches(finding, reading, pricing)
    if layout.dp > 1:
        yield from _sum_gradients(finding, pricing)


def _sum_gradients(finding: Finding, pricing: Pricing) -> Iterator[Lever]:
    """Gradients are summed once per step: in smaller buckets beside the backward pass, or after twice the tokens."""
    layout, job = pricing.plan.layout, pricing.plan.train
    assert job is not None
    bucket, tokens = layout.bucket_bytes // GRADIENT_BUCKET_RATIO, 2 * job.batch_tokens
    if layout.zero == 0 and bucket:
        yield from _lever(
            pricing.price({"layout.bucket_bytes": bucket}),
            f"gradients in pieces of {bytes_text(layout.bucket_bytes)} → {bytes_text(bucket)}",
        )
    priced = pricing.price({"train.batch_tokens": tokens}) if finding.share >= LARGER_BATCH_SHARE else None
    if priced is not None:
        yield Lever(
            title=f"sum gradients after {job.batch_tokens:,} → {tokens:,} tokens",
            change=priced.change,
            speedup=2 * priced.speedup,
            of="tokens_per_s",
            basis=PLANNER,
            risk="half as many updates from the same tokens: look at the learning rate",
        )


def _fill_the_pipe(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    if pricing is None:
        return
    layout = pricing.plan.layout
    smaller = [size for size in range(1, layout.micro_batch) if layout.micro_batch % size == 0]
    candidates = [
        candidate for size in smaller if (candidate := pricing.price({"layout.micro_batch": size})) is not None
    ]
    for priced in sorted(candidates, key=lambda candidate: -candidate.speedup)[:1]:
        yield from _lever(
            priced, f"micro-batch {layout.micro_batch} → {priced.change['layout.micro_batch']}, so more of them"
        )
    if layout.schedule != "zero_bubble":
        yield from _lever(pricing.price({"layout.schedule": "zero_bubble"}), "zero-bubble schedule")
    if layout.interleave == 1:
        change = {"layout.schedule": "interleaved", "layout.interleave": 2}
        yield from _lever(pricing.price(change), "two chunks of layers a stage")
    flat: dict[str, object] = {"layout.pp": 1, "layout.dp": layout.dp * layout.pp}
    flat |= {"layout.schedule": "1f1b"} if layout.schedule != "1f1b" else {}
    flat |= {"layout.interleave": 1} if layout.interleave > 1 else {}
    yield from _lever(pricing.price(flat), f"pp {layout.pp} → 1, dp {layout.dp} → {flat['layout.dp']}")


def _replace_rank(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    rank = next((int(evidence.value) for evidence in finding.evidence if evidence.gauge == "slowest_rank"), 0)
    yield Lever(
        title=f"look at rank {rank}",
        speedup=speedup(min(0.99, finding.share), float("inf")),
        basis=AMDAHL,
        action=f"see what else runs beside rank {rank}, its clock and its links; take the machine out if it stays slow",
    )


def _keep_activations(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    if pricing is None:
        return
    kind = pricing.plan.layout.recompute
    weaker = {"full": ("none", "selective"), "selective": ("none",), "none": ()}[kind]
    for other in weaker:
        yield from _lever(pricing.price({"layout.recompute": other}), f"recompute {kind} → {other}")


def _keep_here(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    if pricing is not None:
        what = pricing.plan.layout.offload
        yield from _lever(pricing.kept_here({"layout.offload": "none"}), f"offload {what} → none")


def _make_room(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """Changes that free memory, at the price of time."""
    if pricing is None:
        return
    layout = pricing.plan.layout
    half = layout.micro_batch // 2
    changes: dict[str, dict[str, object]] = {
        "recompute none → selective": {"layout.recompute": "selective"},
        f"micro-batch {layout.micro_batch} → {half}": {"layout.micro_batch": half},
        f"zero {layout.zero} → {min(3, layout.zero + 1)}": {"layout.zero": min(3, layout.zero + 1)},
        "recompute whole layers": {"layout.recompute": "full"},
        "optimiser states on the host": {"layout.offload": "optimizer"},
    }
    if layout.recompute != "none":
        changes.pop("recompute none → selective")
    for title, change in changes.items():
        priced = pricing.price(change)
        held = pricing.held_bytes
        if priced is None or priced.memory_bytes > -MIN_FREED_SHARE * held:
            continue
        slower = f"a step takes {1 / priced.speedup:.2f} times as long" if priced.speedup < 0.995 else "none"
        yield Lever(
            title=title,
            change=change,
            speedup=held / (held + priced.memory_bytes),
            of="memory_peak_bytes",
            risk=slower,
            basis="planner",
        )


def _balance(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    """What balancing brings the busiest expert's load down to; where experts lie on several ranks that is time."""
    heavy = next(
        (evidence.value for evidence in finding.evidence if evidence.gauge == "expert_load_max_over_mean"), 1.0
    )
    plan = reading.plan
    moe = plan.model.moe if plan is not None else None
    job = plan.train if plan is not None else None
    change: dict[str, object] = {}
    if moe is not None and job is not None:
        weight = moe.aux_loss if job.balance_loss is None else job.balance_loss
        change = (
            {"train.balance_loss": max(0.01, 10 * weight)}
            if weight < 0.1
            else {"train.expert_capacity": float(BALANCED_EXPERT_LOAD)}
        )
    least = min([BALANCED_EXPERT_LOAD, *reading.series("expert_load_max_over_mean")])
    yield Lever(
        title="balance the experts",
        change=change,
        speedup=max(1.0, heavy / max(1.0, least)),
        of="expert_load_max_over_mean",
        basis="the load that balanced routers come to, or this run's own best",
        action="" if change else "raise the weight of the balance loss",
        risk="the loss has one more term",
    )


def _save_less(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    if pricing is None or pricing.parts is None or pricing.plan.train is None:
        return
    every = pricing.plan.train.save_every
    if every is None:
        return
    period = _rounded(every * pricing.parts.share(pricing.parts.checkpoint) / STALL_TARGET_SHARE, every)
    seconds = pricing.parts.checkpoint * every / period
    yield from _lever(
        pricing.priced({"train.save_every": period}, checkpoint=seconds),
        f"checkpoints every {every} → {period} steps",
        basis=AMDAHL,
        risk=f"a failure costs up to {period} steps",
    )


def _validate_less(finding: Finding, reading: Reading, pricing: Pricing | None) -> Iterator[Lever]:
    if pricing is None or pricing.parts is None or pricing.plan.train is None:
        return
    every = pricing.plan.train.eval_every
    period = _rounded(every * pricing.parts.share(pricing.parts.validation) / STALL_TARGET_SHARE, every)
    seconds = pricing.parts.validation * every / period
    yield from _lever(
        pricing.priced({"train.eval_every": period}, validation=seconds),
        f"validation every {every} → {period} steps",
        basis=AMDAHL,
        risk="the validation loss is seen less often",
    )


def _rounded(wanted: float, least: int) -> int:
    """A round number of steps, 1, 2 or 5 times a power of ten, at least twice what it was."""
    enough = max(wanted, 2.0 * least)
    power = int("1" + "0" * (len(str(int(enough))) - 1))
    return next(power * times for times in (1, 2, 5, 10, 20) if power * times >= 0.99 * enough)


_AGAINST: dict[Cause, _Levers] = {
    "data_starvation": _workers,
    "launch_overhead": _computing,
    "sync": _off_the_host,
    "precision": _other_width,
    "compute": _computing,
    "memory_bandwidth": _computing,
    "exposed_communication": _talk_less,
    "bubble": _fill_the_pipe,
    "straggler": _replace_rank,
    "needless_recompute": _keep_activations,
    "needless_offload": _keep_here,
    "memory_pressure": _make_room,
    "expert_imbalance": _balance,
    "checkpoint_stall": _save_less,
    "validation_stall": _validate_less,
}
