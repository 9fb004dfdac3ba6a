"""Serving plan as text: memory, latencies and cost of a deployment, and every term with its numbers."""

from dataclasses import dataclass, fields

from armillary.planning.serving.capacity import LIMITS, Capacity
from armillary.planning.serving.deployment_options import DeploymentOption, Request
from armillary.planning.serving.disaggregation import Pools
from armillary.planning.serving.replica import EngineStepTime
from armillary.planning.serving.serving_memory import sequence_bytes
from armillary.units import bytes_text, count_text, dollars_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of a prediction: its formula, and the formula with numbers."""

    name: str
    formula: str
    numbers: str
    value: str


def plan_rows(request: Request, option: DeploymentOption, split: Pools | None = None) -> list[tuple[str, str]]:
    """(label, text) of the plan, in reading order."""
    assert option.capacity is not None, "a refused choice has no plan"
    point, memory, traffic = option.capacity.actual, option.capacity.memory, request.traffic
    available = request.cluster.num_devices
    missing = f" ({available} are available: raise --on, or relax the objectives)" if option.devices > available else ""
    rows = [
        ("replica", f"{option.split.text()}, weights {option.dtypes.weights}, KV cache {option.dtypes.kv}"),
        (
            "memory / device",
            f"weights {bytes_text(memory.weights_bytes)}  KV cache {bytes_text(memory.kv_bytes)}  "
            f"working {bytes_text(memory.working_bytes)}  of {bytes_text(memory.device_bytes)}",
        ),
        ("KV cache", _cache_text(option.capacity)),
        (
            "per replica",
            f"{option.capacity.highest.requests_per_s:.3g} requests/s at most" + _limit_text(request, option.capacity),
        ),
        (
            "all at once",
            f"{option.capacity.saturated.tokens_out_per_s:,.0f} tokens/s out of a replica that always runs "
            f"{_many(option.capacity.server.most_running, 'request')}",
        ),
        (
            "needed",
            f"{_many(option.capacity.replicas, 'replica')}, {_many(option.devices, 'device')} for "
            f"{traffic.total_per_s:g} requests/s{missing}",
        ),
        ("TTFT", f"p50 {seconds_text(point.ttft_p50_s)}  p99 {seconds_text(point.ttft_p99_s)}"),
        ("ITL", f"p50 {seconds_text(point.itl_p50_s)}  p99 {seconds_text(point.itl_p99_s)}"),
        (
            "throughput",
            f"{traffic.tokens_out_per_s:,.0f} tokens/s out, {traffic.tokens_in_per_s:,.0f} in; "
            f"{point.running:.1f} requests run at a time",
        ),
    ]
    return rows + _cost_rows(option) + _pool_rows(option, split)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cache_text(option: Capacity) -> str:
    values, traffic = option.predicted(), option.server.traffic
    tokens = traffic.running_tokens_in + traffic.running_tokens_out
    return (
        f"{count_text(values['kv_capacity_tokens'])} tokens per replica = {values['concurrency']:,.0f} requests of "
        f"{tokens:,} tokens, {bytes_text(sequence_bytes(option.server.replica, tokens))} each per device"
    )


def _limit_text(request: Request, option: Capacity) -> str:
    """What limits the rate: the nearest objective, the batch size, or the time of prompts."""
    high = option.highest
    shares = {
        name: getattr(high, name) / wanted
        for name in LIMITS
        if (wanted := getattr(request.objective, name)) is not None
    }
    if shares and max(shares.values()) > 0.97:
        return f", limited by {max(shares, key=lambda name: shares[name])}"
    if option.rows_limit:
        full = option.server.most_running < option.server.serve.max_running * option.server.replica.split.ep
        return ", limited by the KV cache" if full else ", limited by serve.max_running, of which bursts need a part"
    return ", limited by prefill time"


def _cost_rows(option: DeploymentOption) -> list[tuple[str, str]]:
    if option.cost is None:
        return [("cost", "no price is known; try --set cost.usd_per_device_hour=2.5")]
    cost = option.cost
    text = (
        f"{dollars_text(cost.million_tokens_usd)} per million tokens (in {dollars_text(cost.million_in_usd)}, "
        f"out {dollars_text(cost.million_out_usd)}), {dollars_text(cost.month_usd)} per month at "
        f"{dollars_text(cost.device_hour_usd)} per device-hour"
    )
    return [("cost", text)]


def _pool_rows(option: DeploymentOption, split: Pools | None) -> list[tuple[str, str]]:
    if split is None:
        return []
    assert option.capacity is not None, "a refused choice has no plan"
    return [
        (
            "disaggregated",
            f"{split.prefill.replicas} prefill + {split.decode.replicas} decode replicas: "
            f"{split.verdict(option.capacity)}",
        )
    ]


def choice_cells(option: DeploymentOption) -> list[str]:
    """One row of the table of options: parallelism, weights, replicas, devices, rate, TTFT, ITL, dollars or reason."""
    head = [option.split.text(), option.dtypes.weights]
    if option.capacity is None:
        return [*head, "", "", "", "", "", option.reason]
    point, cost = option.capacity.actual, option.cost
    return [
        *head,
        str(option.capacity.replicas),
        str(option.devices),
        f"{option.capacity.highest.requests_per_s:.3g}",
        seconds_text(point.ttft_p99_s),
        seconds_text(point.itl_p99_s),
        dollars_text(cost.million_tokens_usd) if cost else "",
    ]


CHOICE_COLUMNS = ("replica", "weights", "replicas", "devices", "requests/s", "TTFT p99", "ITL p99", "$/M tokens")


# --- explaining


def explain(request: Request, option: DeploymentOption) -> list[Term]:
    """Every term of the plan, with its formula and its numbers."""
    assert option.capacity is not None, "a refused option has nothing to explain"
    server, point = option.capacity.server, option.capacity.actual
    traffic, memory = request.traffic, option.capacity.memory
    rate, running = point.requests_per_s, max(1, round(point.running))
    decode = server.replica.decode(running, server.context)
    prefill = server.replica.prefill(server.prompt, cached=server.cached)
    tokens = traffic.running_tokens_in + traffic.running_tokens_out
    each = sequence_bytes(server.replica, tokens)
    return [
        *_step_terms(f"decode step of {running}", decode),
        *_step_terms(f"prefill of {server.prompt:,}", prefill),
        Term(
            name="KV cache per request",
            formula="Σ layers · 2 · kv_heads/tp · head_dim · tokens · bytes",
            numbers=f"{tokens:,} tokens",
            value=bytes_text(each),
        ),
        Term(
            name="concurrency",
            formula="⌊(memory · 0.9 − weights − working) / KV cache per request⌋ · ep",
            numbers=f"⌊{bytes_text(memory.kv_bytes)} / {bytes_text(each)}⌋ · {option.split.ep}",
            value=f"{option.predicted()['concurrency']:,.0f}",
        ),
        Term(
            name="step",
            formula="d(b) / (1 − λ·p)",
            value=seconds_text(point.step_s),
            numbers=f"{seconds_text(decode.total_s)} / (1 − {rate:.3g} · {server.prefill_s:.3g})",
        ),
        Term(
            name="running",
            formula="λ · (out − 1) · step",
            value=f"{point.running:.3g}",
            numbers=f"{rate:.3g} · {traffic.tokens_per_request[1] - 1:g} · {point.step_s:.3g}",
        ),
        Term(
            name="replicas",
            formula="⌈rate / highest rate of a replica⌉",
            value=str(option.capacity.replicas),
            numbers=f"⌈{traffic.total_per_s:g} / {option.capacity.highest.requests_per_s:.4g}⌉",
        ),
        *_cost_terms(option, traffic.tokens_in_per_s + traffic.tokens_out_per_s),
    ]


def _step_terms(name: str, time: EngineStepTime) -> list[Term]:
    parts = [(part.name.removesuffix("_s"), getattr(time, part.name)) for part in fields(time)]
    numbers = " + ".join(f"{label} {seconds_text(value)}" for label, value in parts if value > 0)
    formula = "gemm + experts + attention + other + kernels + comm + host"
    return [Term(name=name, formula=formula, numbers=numbers, value=seconds_text(time.total_s))]


def _cost_terms(option: DeploymentOption, tokens_per_s: float) -> list[Term]:
    if option.cost is None:
        return []
    cost = option.cost
    return [
        Term(
            name="per million tokens",
            formula="devices · $/h / 3600 / (tokens/s) · 10⁶",
            numbers=f"{option.devices} · {cost.device_hour_usd:.3g} / 3600 / {tokens_per_s:,.0f} · 10⁶",
            value=dollars_text(cost.million_tokens_usd),
        )
    ]
