"""Charts of the tab Plan: memory, step time, operations under the roofline, and what other sizes would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, isinf

from armillary.planning.serving.replica import curve_name
from armillary.planning.serving.serving_plan import ServingPlan
from armillary.planning.training.layer_gemms import layer_gemms
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.other_sizes import other_sizes
from armillary.planning.training.training_plan import TrainingPlan
from armillary.report.bars import Bar, BarGroup, bars, shares
from armillary.report.charts import lines
from armillary.report.page import section, side_by_side
from armillary.report.rooflines import DevicePeaks, Operation, rooflines
from armillary.units import bytes_text, dollars_text, flops_per_s_text, seconds_text

COLOURS = ("useful", "sync", "inefficiency", "comm_exposed", "launch_gap", "host", "idle", "unjudged", "unknown")
RATES = 80
"""points of a cost curve over traffic"""
FEWEST_SIZES = 2


def memory_chart(plan: TrainingPlan) -> str:
    prediction = plan.prediction
    return _memory(prediction.memory.parts(), float(prediction.memory.total[0]), prediction.memory_limit)


def serving_memory_chart(plan: ServingPlan) -> str:
    memory = plan.capacity.memory
    parts = {"weights": memory.weights_bytes, "KV cache": memory.kv_bytes, "working memory": memory.working_bytes}
    return _memory(parts, sum(parts.values()), memory.device_bytes)


def _memory(sizes: Mapping[str, float], total: float, limit: float) -> str:
    groups = [
        BarGroup(name=name, bars=[Bar(value=size, text=bytes_text(size))]) for name, size in sizes.items() if size > 0
    ]
    groups.append(BarGroup(name="together", bars=[Bar(value=total, text=bytes_text(total))], bold=True))
    if isinf(limit):  # a device whose memory nobody knows
        return bars(groups, label=f"Memory: {bytes_text(total)}")
    label = f"{bytes_text(total)} of {bytes_text(limit)}; the dashed line is what the device has"
    return f"<p>{escape(label)}</p>" + bars(groups, label=f"Memory: {label}", full=max(total, limit), limit=limit)


def step_chart(prediction: Prediction) -> str:
    parts, total = prediction.time.shown_parts(), float(prediction.time.total[0])
    return shares(
        [
            (name, seconds / total, f"var(--{colour})", seconds_text(seconds), seconds_text(seconds))
            for (name, seconds), colour in zip(parts.items(), COLOURS, strict=False)
            if seconds > 0
        ]
    )


# --- rooflines


def training_roofline(prediction: Prediction) -> str:
    """The GEMMs of a layer, at the speed that the planner predicts for them."""
    curves, precision = prediction.case.curves, prediction.precision()
    chip = prediction.case.cluster.chip
    peaks = DevicePeaks(
        name=f"{chip.title}, {precision}", flops_per_s=curves.peaks[precision], bytes_per_s=curves.bytes_per_s
    )
    gemms = [
        Operation(name=gemm.name, intensity=gemm.intensity, flops_per_s=gemm.flops_per_s)
        for gemm in layer_gemms(prediction)
    ]
    return _roofline(peaks, gemms, "GEMMs of a layer, forward, for one micro-batch, as predicted:")


def serving_roofline(plan: ServingPlan) -> str:
    """The GEMMs of a prefill and of a decode step, at the speed that the planner predicts for them."""
    replica, traffic = plan.capacity.server.replica, plan.request.traffic
    dtype, running = plan.chosen.dtypes.compute, max(1, round(plan.capacity.actual.running))
    name = f"{replica.cluster.chip.title}, {dtype}"
    peaks = DevicePeaks(
        name=name, flops_per_s=replica.curves.peaks[curve_name(dtype)], bytes_per_s=replica.curves.bytes_per_s
    )
    prompt, context = traffic.tokens_in, plan.capacity.server.context
    steps = (
        (f"prefill of {prompt:,} tokens", replica.forward.ops(prompt, 1, decoding=False), replica.prefill(prompt)),
        (
            f"decode, {running:,} at a time",
            replica.forward.ops(running, running, decoding=True),
            replica.decode(running, context),
        ),
    )
    operations = []
    for title, ops, step in steps:
        gemms = [(op, count) for op, count in ops if op.kind == "matmul"]
        flops, moved = (sum(getattr(op, of) * count for op, count in gemms) for of in ("flops", "bytes"))
        rate = flops / (step.gemm_s + step.experts_s)
        operations.append(Operation(name=title, intensity=flops / moved, flops_per_s=rate))
    return _roofline(peaks, operations, "GEMMs of a step of the engine, as predicted:")


def _roofline(peaks: DevicePeaks, operations: Sequence[Operation], says: str) -> str:
    chart = rooflines([peaks], label=f"Roofline of {peaks.name}", y_text=flops_per_s_text, operations=operations)
    speeds = ", ".join(f"{each.name} {flops_per_s_text(each.flops_per_s)}" for each in operations)
    return f"<p>{escape(says)} {escape(speeds)}.</p>{chart}"


# --- cost curves


def training_costs(plan: TrainingPlan) -> str:
    """Cost and duration of the run over the number of devices; empty where there is only one size."""
    if plan.cost is None:
        return ""
    sizes = [(plan.problem.case.cluster.num_devices, plan.cost)]
    sizes += [(other.devices, other.cost) for other in other_sizes(plan) if other.cost is not None]
    if len(sizes) < FEWEST_SIZES:
        return ""
    sizes.sort(key=lambda size: size[0])
    cost = [(float(devices), each.run_usd) for devices, each in sizes]
    days = [(float(devices), each.run_s / 86_400) for devices, each in sizes]
    return side_by_side(
        section(
            "Cost of the run",
            lines([("cost", cost)], label="Cost over devices", x_name="devices", y_text=_whole_dollars),
        ),
        section(
            "Duration",
            lines([("days", days)], label="Duration over devices", x_name="devices", y_text=lambda days: f"{days:g} d"),
        ),
    )


def _whole_dollars(value: float) -> str:
    """Short enough for the margin of a small chart."""
    return f"${value:,.0f}" if value < 1e4 else dollars_text(value)


def serving_costs(plan: ServingPlan) -> str:
    """Cost per million tokens over the traffic: whole replicas are paid for."""
    cost, capacity, traffic = plan.chosen.cost, plan.capacity, plan.request.traffic
    if cost is None:
        return ""
    highest, tokens = capacity.highest.requests_per_s, sum(traffic.tokens_per_request)
    second = capacity.server.replica.split.num_devices * cost.device_hour_usd / 3600
    most = max(2 * traffic.total_per_s, 4 * highest)
    rates = [most * (i + 1) / RATES for i in range(2, RATES)]
    points = [(rate, ceil(rate / highest) * second / (rate * tokens) * 1e6) for rate in rates]
    chart = lines(
        [("$ per million tokens", points)],
        label="Cost per million tokens over requests per second",
        x_name="requests/s",
        y_text=dollars_text,
        marks=[(traffic.total_per_s, "planned")],
    )
    return section("Cost per million tokens", chart)
