"""Levers of a server, priced by replaying the run's own requests with each change.

A lever is judged by the gauge that limits: a missed objective; throughput, where all requests arrived at once or the
queue grows without end; else the latency that the cause stretches. Of several values of one key, the smallest that
gains nearly as much as the best is taken.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from statistics import median
from typing import Any

from armillary.diagnosis.evidence.finding import Finding, Lever
from armillary.diagnosis.evidence.serving_run import ServingRun
from armillary.diagnosis.evidence.thresholds import (
    AFTER_OWNER_SHARE,
    GRAPH_HOST_S,
    GRAPH_REPLAY_S,
    GROWING_QUEUE_SHARE,
    MIN_CHUNK_TOKENS,
    NEAR_BEST_SHARE,
    QUEUE_OWNER_SHARE,
    USABLE_MEMORY_SHARE,
)
from armillary.diagnosis.levers.serving_replay import Change, Replay, harms, risk_of, waits
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import ArmillaryError
from armillary.planning.serving.deployment_options import serving_dtypes
from armillary.planning.serving.engines import own_rates
from armillary.planning.serving.forward_ops import Split
from armillary.planning.serving.replica import Replica
from armillary.planning.simulation.step_cost import StepCost, extrapolate_batch, planned_step_cost
from armillary.spec.arithmetic.params import parameters
from armillary.store.home import Home
from armillary.units import bytes_text


def levers_for(finding: Finding, reading: Reading, home: Home) -> tuple[Lever, ...]:
    """Priced levers against a finding, best first; none where there is nothing to replay."""
    plan = reading.plan
    service = ServingRun(reading, plan)
    if plan is None or service.cost is None:
        return ()
    replay = Replay(service, plan.model, service.cost)
    if len(replay.arrivals) < 2 or not reading.get("kv_capacity_tokens"):
        return ()
    make = _LEVERS.get(finding.rule)
    levers = make(finding, replay, home) if make is not None else []
    return tuple(sorted(levers, key=lambda lever: -lever.speedup))


def limiting_gauge(finding: Finding, service: ServingRun) -> str:
    """The gauge that a lever against the finding has to improve."""
    if finding.cause == "prefill_interference":
        return "itl_p99_s"
    grows = is_overloaded(service)
    missed = [name for name in service.missed if not (grows and name in ("ttft_p99_s", "e2e_p99_s"))]
    if missed:
        return missed[0]
    if service.batch_job or grows:
        return "tokens_out_per_s"
    return "ttft_p50_s" if finding.cause == "cache_misses" and service.queue_share < 0.5 else "e2e_p50_s"


def is_overloaded(service: ServingRun) -> bool:
    """Whether requests arrive so fast that the queue grows without end."""
    return not service.batch_job and min(service.queue_share, service.excess) >= GROWING_QUEUE_SHARE


def assign_queue(findings: list[Finding]) -> list[Finding]:
    """Findings with corrected shares. A cause whose lever gains much less than one more server would does not own the
    queue; what is left are too few servers. One whose lever gains about as much owns it, since it takes no device: it
    goes first, even where servers are needed as well."""
    crowd = next((finding for finding in findings if finding.cause == "too_few_replicas" and finding.levers), None)
    if crowd is None:
        return findings
    best = crowd.levers[0]
    each = (best.speedup - 1) / max(1, best.devices - 1)
    gains = {finding.rule: _free_gain(finding, best.of) for finding in findings if finding is not crowd}
    known = {rule: gain for rule, gain in gains.items() if gain}
    weak = {rule: gain for rule, gain in known.items() if gain - 1 < QUEUE_OWNER_SHARE * each}
    shares = {rule: max(0.0, 1 - 1 / gain) for rule, gain in weak.items()}
    if weak and len(weak) == len(known):
        shares[crowd.rule] = 1 - 1 / best.speedup
    elif len(known) > len(weak):
        owner = max(known, key=known.__getitem__)
        shares |= {owner: crowd.share, crowd.rule: AFTER_OWNER_SHARE * crowd.share}
    return [replace(finding, share=shares.get(finding.rule, finding.share)) for finding in findings]


def _free_gain(finding: Finding, gauge: str) -> float:
    """The most that a lever on this device gains; 0 without one."""
    return max((lever.speedup for lever in finding.levers if lever.of == gauge and lever.devices == 1), default=0.0)


# --- by rule


def _batching(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    title = "start requests as soon as a row is free"
    return _smallest_enough(finding, replay, [{"serve.batching": "continuous"}], lambda _: title)


def _more_rows(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    now, wanted = replay.service.serve.max_running, replay.service.wanted
    replay = _with_more_rows(replay)
    sizes = [now << doublings for doublings in range(1, 7) if now << doublings < 2 * wanted]
    budget = replay.service.serve.max_tokens_per_step  # of a step, which must hold one token per row
    tried: list[Change] = [
        {"serve.max_running": rows} | ({"serve.max_tokens_per_step": rows} if rows > budget else {}) for rows in sizes
    ]
    return _smallest_enough(
        finding, replay, tried, lambda change: f"run {now} → {change['serve.max_running']} requests together"
    )


def _with_more_rows(replay: Replay) -> Replay:
    """Where steps of few rows do not say what many cost: on a GPU, the planner."""
    service = replay.service
    planned = _planned(service) if service.plan is not None and service.plan.cluster.chip.kind == "gpu" else None
    if planned is None:
        return replay
    cost = extrapolate_batch(replay.cost, planned, service.rows, service.context or 512.0)
    return Replay(service, replay.config, cost)


def _more_blocks(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    now, free = replay.kv_bytes, _free_bytes(replay)
    tried = [{"serve.kv_bytes": int(now * times)} for times in (1.5, 2, 3, 4, 8) if now * (times - 1) <= free]
    if not tried:  # the device is full: only another one helps
        return _more_replicas(finding, replay, home)
    return _smallest_enough(
        finding, replay, tried, lambda change: f"KV cache {bytes_text(now)} → {bytes_text(change['serve.kv_bytes'])}"
    )


def _cache_on(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    return _smallest_enough(finding, replay, [{"serve.prefix_cache": True}], lambda _: "enable the prefix cache")


def _smaller_chunks(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    """The best inter-token latency without much harm: with smaller chunks, prompts take more steps to their first
    token."""
    mixed = [step for step in replay.service.reading.steps if step.get("decode_tokens")]
    largest = max((step.get("prefill_tokens", 0) for step in mixed), default=0)
    sizes = (MIN_CHUNK_TOKENS << doublings for doublings in range(64))
    tried: list[Change] = [{"serve.prefill_tokens": size} for size in takewhile(lambda size: size < largest, sizes)]
    harmless = [change for change in tried if not harms(replay, change)]
    return _smallest_enough(
        finding,
        replay,
        harmless[::-1],
        lambda change: f"{change['serve.prefill_tokens']} prompt tokens per step beside decodes",
    )


def _larger_steps(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    serve = replay.service.serve
    now = serve.max_tokens_per_step
    tried: list[Change] = [{"serve.max_tokens_per_step": now * times} for times in (2, 4, 8)]
    if serve.prefill_tokens is not None:
        tried = [{"serve.prefill_tokens": min(now, serve.prefill_tokens * times)} for times in (2, 4, 8, 16)] + tried
    return _smallest_enough(finding, replay, tried, lambda change: "more prompt tokens per step")


def _more_replicas(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    """As many servers as clear the queue."""
    counts = [count for count in (2, 3, 4, 6, 8, 12, 16) if count < len(replay.arrivals)]
    enough = next((count for count in counts if not waits(replay, {"layout.dp": count})), counts[-1] if counts else 0)
    tried: list[Change] = [{"layout.dp": enough}] if enough else []
    levers = _smallest_enough(
        finding, replay, tried, lambda change: f"{change['layout.dp']} servers behind one address"
    )
    return [
        replace(
            lever,
            change={},
            action=f"start {enough} servers and deal requests out to them in turn",
            devices=enough,
            risk=f"{enough} × the devices",
        )
        for lever in levers
    ]


def _graphs(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    """With CUDA graphs, a step takes the planner's device time, but at least what the host still needs for a step."""
    change, gauge = {"serve.graphs": True}, limiting_gauge(finding, replay.service)
    cost = launched_at_once(replay.service)
    gain = replay.speedup(gauge, change, cost) if cost is not None else None
    if gain is None:
        return []
    return [
        Lever(
            title="launch steps as CUDA graphs",
            change=change,
            speedup=gain,
            of=gauge,
            risk="some seconds to capture them at the start",
            basis="planner's device time of the same steps, requests replayed",
        )
    ]


def launched_at_once(service: ServingRun) -> StepCost | None:
    """Step time without the launches."""
    planned = _planned(service)
    if service.cost is None or planned is None:
        return None
    return replace(planned, base_s=min(max(planned.base_s, _host_s(service)), service.cost.base_s), waits=True)


def _planned(service: ServingRun) -> StepCost | None:
    """Step time by the planner's roofline; none where the planner does not know the device."""
    plan = service.plan
    assert plan is not None
    try:
        precision = "fp8" if service.serve.weights == "fp8" else plan.layout.precision
        dtypes = serving_dtypes(precision, plan.cluster.chip, service.serve.kv_dtype)
        replica = Replica(
            config=plan.model,
            cluster=plan.cluster,
            split=Split(tp=plan.layout.tp),
            dtypes=dtypes,
            rates=own_rates(),
        )
        return planned_step_cost(replica, context=int(service.context) or 512)
    except ArmillaryError:
        return None


def _host_s(service: ServingRun) -> float:
    """Host seconds of a decode step with CUDA graphs: all but its launches, plus a graph replay."""
    steps = [step for step in service.reading.steps if "engine_launch_s" in step and not step.get("prefill_tokens")]
    if not steps:
        return max(GRAPH_HOST_S, service.reading.get("engine_schedule_s") or 0.0)
    rest = [float(step["engine_step_s"] - step["engine_wait_s"] - step["engine_launch_s"]) for step in steps]
    return GRAPH_REPLAY_S + median(rest)


def _overlap(finding: Finding, replay: Replay, home: Home) -> list[Lever]:
    reading = replay.service.reading
    step, decided = reading.get("engine_step_s") or 0.0, reading.get("engine_schedule_s") or 0.0
    if step <= decided:
        return []
    return [
        Lever(
            title="schedule the next step while one runs",
            change={"serve.overlap": True},
            of="engine_step_s",
            speedup=step / max(step - decided, decided),
            basis="Amdahl over the parts of a step",
        )
    ]


# --- parts


def _smallest_enough(
    finding: Finding, replay: Replay, tried: Iterable[Change], title: Callable[[Mapping[str, Any]], str]
) -> list[Lever]:
    """Of increasing changes, the first that gains nearly as much as the best. Where a queue grows, all changes that
    end it bring the same throughput: there it is the first that makes requests nearly as fast as the best."""
    service = replay.service
    gauge = limiting_gauge(finding, service)
    by = "e2e_p99_s" if is_overloaded(service) and gauge == "tokens_out_per_s" else gauge
    tried = list(tried)
    gains = [_gain(replay, by, change) or 0.0 for change in tried]
    enough = [
        change for change, gain in zip(tried, gains, strict=True) if gain - 1 >= NEAR_BEST_SHARE * (max(gains) - 1)
    ]
    return [
        Lever(
            title=title(change),
            change=change,
            speedup=gain,
            of=gauge,
            risk=risk_of(replay, change),
            basis=_basis(replay, gauge),
        )
        for change in enough[:1]
        if (gain := _gain(replay, gauge, change)) is not None
    ]


def _gain(replay: Replay, gauge: str, change: Change) -> float | None:
    try:
        return replay.speedup(gauge, change)
    except ArmillaryError:  # settings that do not go together
        return None


def _basis(replay: Replay, gauge: str) -> str:
    off, cost = replay.off_by(gauge), replay.cost
    known = f"; the run as it was comes out within {off:.0%}" if off is not None else ""
    return f"{len(replay.arrivals)} requests replayed, steps {cost.basis}{known}"


def _free_bytes(replay: Replay) -> float:
    """Memory left beside weights and KV cache; 8 × the cache where the device's memory is not known."""
    plan, config = replay.service.plan, replay.config
    memory = plan.cluster.chip.memory_bytes if plan is not None else None
    if not memory:
        return 8.0 * replay.kv_bytes
    return max(0.0, USABLE_MEMORY_SHARE * memory - 2 * parameters(config).total - replay.kv_bytes)


_LEVERS: dict[str, Callable[[Finding, Replay, Home], list[Lever]]] = {
    "static_batching": _batching,
    "batch_too_small": _more_rows,
    "kv_pressure": _more_blocks,
    "preemption": _more_blocks,
    "prefix_cache_off": _cache_on,
    "prefix_cache_too_small": _more_blocks,
    "prefill_interference": _smaller_chunks,
    "queueing": _larger_steps,
    "too_few_replicas": _more_replicas,
    "graphs_off": _graphs,
    "deciding_alone": _overlap,
}
"""rule -> function that prices its levers"""
