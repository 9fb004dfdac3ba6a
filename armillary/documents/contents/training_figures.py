"""Figures of a training plan: speed, failures, duration, dollars, memory, step time and storage."""

from __future__ import annotations

from armillary.documents.contents.price_figures import FAILURES, Priced, add_goodput, add_prices
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.planning.cost.cost import device_hour
from armillary.planning.cost.failures import HOUR
from armillary.planning.cost.storage import RunStorage
from armillary.planning.training.training_plan import TrainingPlan
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters

TRAINING, MONEY, MEMORY, STEP, STORAGE = "Training", "Training cost", "Memory per device", "Step time", "Storage"
OBJECT_STORE = "s3"
"""tier of the catalogue that stored bytes are priced by"""


def add_training(figures: Figures, facts: PlanFacts, plan: TrainingPlan) -> Priced | None:
    """All figures of the plan; the prices, or None where none is known."""
    _add_workload(figures, plan)
    _add_failures(figures, plan)
    priced = _add_cost(figures, facts, plan)
    _add_memory(figures, plan)
    _add_step(figures, plan)
    _add_storage(figures, plan, plan.storage())
    return priced


def _add_workload(figures: Figures, plan: TrainingPlan) -> None:
    job, prediction = plan.problem.recipe.train, plan.prediction
    devices = prediction.layout().num_devices
    count, chip = parameters(plan.problem.model), plan.problem.case.cluster.chip

    def put(key: str, label: str, value: float, unit: str, source: str) -> None:
        figures.put(TRAINING, key, label, value, unit, source)

    put("parameters", "Parameters", count.total, "tokens", "model configuration")
    put("devices", "Devices", devices, "count", "hardware and layout of the recipe")
    put("sequence", "Sequence length", job.sequence, "count", "train.sequence")
    put("batch_tokens", "Tokens per step", job.batch_tokens, "count", "train.batch_tokens")
    put("steps", "Steps", job.steps, "count", "train.steps")
    speed = float(prediction.tokens_per_s[0])
    ceilings = prediction.case.curves.source
    put("device_tokens_per_s", "Tokens/s per device", speed / devices, "tokens/s", f"planner; ceilings: {ceilings}")
    put("mfu", "MFU", float(prediction.mfu[0]), "share", "planner: 6·N, causal attention as half, dense 16-bit peak")
    put(
        "peak_flops",
        "Dense 16-bit peak per device",
        prediction.case.curves.usual_peak,
        "FLOP/s",
        chip.source_of("bf16_flops") or "catalogue",
    )
    derive = figures.derive
    derive(TRAINING, "tokens_per_s", "Tokens/s", "tokens/s", "device_tokens_per_s * devices", speed)
    derive(TRAINING, "step_s", "Step time", "s", "batch_tokens / tokens_per_s", float(prediction.time.total[0]))
    derive(TRAINING, "total_tokens", "Tokens of the run", "tokens", "batch_tokens * steps", float(job.total_tokens))


def _add_failures(figures: Figures, plan: TrainingPlan) -> None:
    failures, devices = plan.goodput.failures, plan.prediction.layout().num_devices
    source = "419 interruptions in 54 days on 16,384 H100s (arXiv 2407.21783, table 5)"
    figures.put(
        FAILURES, "device_mtbf_h", "Time between failures of one device", failures.device_mtbf_s / HOUR, "hours", source
    )
    figures.put(
        FAILURES,
        "checkpoint_s",
        "Time that a checkpoint stops training",
        failures.checkpoint_s,
        "s",
        "planner: bytes over write rate",
    )
    figures.put(FAILURES, "restart_s", "Restart after a failure", failures.restart_s, "s", "assumed")
    failing = "devices"
    if failures.num_devices != devices:
        failing = "cluster_devices"
        figures.put(FAILURES, failing, "Devices that can fail", failures.num_devices, "count", "cluster")
    goodput = plan.goodput.goodput_fraction
    add_goodput(figures, "", FAILURES, f"device_mtbf_h * 3600 / {failing}", "checkpoint_s", "restart_s", goodput)
    formula = "86400 / mtbf_all_s"
    figures.derive(FAILURES, "failures_per_day", "Failures per day", "", formula, plan.goodput.interruptions_per_day)


def _add_cost(figures: Figures, facts: PlanFacts, plan: TrainingPlan) -> Priced | None:
    cost, cluster = plan.problem.recipe.cost, plan.problem.case.cluster
    priced = add_prices(figures, "", cost, cluster, "devices", cluster.num_devices) if plan.cost else None
    useful = "goodput * spot_goodput" if priced and priced.selected == "spot_hour" else "goodput"
    figures.derive(TRAINING, "useful_time", "Useful time, interruptions included", "share", f"min(1, {useful})")
    figures.derive(TRAINING, "run_s", "Duration of the run, failures included", "s", "step_s * steps / useful_time")
    figures.derive(TRAINING, "run_days", "Duration in days", "days", "run_s / 86400")
    figures.derive(TRAINING, "device_hours", "Device-hours", "hours", "devices * run_s / 3600")
    if priced is None or plan.cost is None:
        return None
    offer = device_hour(cost, cluster)
    derive = figures.derive
    derive(
        MONEY, "device_hour", f"Device-hour for training, {offer.name}", "money/h", priced.selected, offer.usd_per_hour
    )
    derive(MONEY, "run_cost", "Training run", "money", "device_hours * device_hour", plan.cost.run_usd)
    derive(MONEY, "step_cost", "Step", "money", "run_cost / steps", plan.cost.step_usd)
    per_million = plan.cost.million_trained_tokens_usd
    derive(MONEY, "trained_cost", "Million trained tokens", "money/M", "run_cost / total_tokens * 1000000", per_million)
    return priced


def _add_memory(figures: Figures, plan: TrainingPlan) -> None:
    memory = plan.prediction.memory
    for name, size in memory.parts().items():
        figures.put(MEMORY, f"memory_{name}", name.capitalize(), size, "B", "planner")
    total = " + ".join(f"memory_{name}" for name in memory.parts())
    figures.derive(MEMORY, "memory_peak", "Peak of the fullest device", "B", total, float(memory.total[0]))
    limit = plan.problem.case.cluster.chip.memory_bytes
    if limit:
        figures.put(MEMORY, "memory_limit", "Memory of a device", limit, "B", "hardware catalogue")
        figures.derive(MEMORY, "memory_free", "Left free", "share", "1 - memory_peak / memory_limit")


def _add_step(figures: Figures, plan: TrainingPlan) -> None:
    for name, seconds in plan.prediction.time.shown_parts().items():
        key = f"step_{name.lower().replace(' ', '_').replace('-', '_')}_s"
        figures.put(STEP, key, name[:1].upper() + name[1:], seconds, "s", "planner")


def _add_storage(figures: Figures, plan: TrainingPlan, storage: RunStorage) -> None:
    for need in storage.needs:
        label = need.name.capitalize()
        figures.put(STORAGE, f"{need.name}_bytes", label, need.size_bytes, "B", "planner")
        figures.put(STORAGE, f"{need.name}_kept_bytes", f"{label}, all copies", need.kept_bytes, "B", "planner")
        figures.put(STORAGE, f"{need.name}_read", f"{label}, read", need.read_bytes_per_s, "B/s", "planner")
        figures.put(STORAGE, f"{need.name}_write", f"{label}, write", need.write_bytes_per_s, "B/s", "planner")
    formula = " + ".join(f"{need.name}_kept_bytes" for need in storage.needs)
    figures.derive(STORAGE, "stored_bytes", "Stored together", "B", formula)
    tier = catalogue.storage(OBJECT_STORE)
    if tier.usd_per_gb_month and plan.cost is not None:
        figures.put(
            STORAGE, "gb_month", f"{tier.title}, per GB and month", tier.usd_per_gb_month, "money/GB", tier.source
        )
        figures.derive(STORAGE, "storage_month", "Storage per month", "money", "stored_bytes / 1e9 * gb_month")
