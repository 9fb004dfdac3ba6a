"""Sections on how the plan works: training (memory, step time), serving capacity, reliability, operations, and for a
run what was measured."""

from __future__ import annotations

from armillary.documents.blocks import Block, Bullets, Cell, Chart, Paragraph, Section, Table
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.documents.values import plural
from armillary.planning.serving.capacity import LIMITS
from armillary.planning.training.training_plan import TrainingPlan


def training_section(facts: PlanFacts, figures: Figures) -> Section | None:
    plan = facts.training
    if plan is None:
        return None
    text = figures.say(
        "{model} ({parameters} parameters) is trained on {count} with the layout {layout}. A step of "
        "{batch_tokens} tokens takes {step_s}: {tokens_per_s}, at {mfu} MFU.",
        model=facts.model_name,
        count=plural(figures["devices"].value, "device"),
        layout=plan.prediction.layout_text(),
    )
    template = "Memory: {memory_peak} of the fullest device are used"
    template += " of {memory_limit}; {memory_free} stay free." if "memory_free" in figures else "."
    why = "" if plan.fits else f"{plan.shortage}; {plan.remedy}"  # with no known limit there is no shortage to state
    fit = figures.say(template if plan.fits else "The plan does not fit: {why}.", why=why)
    charts = [_memory_chart(figures, plan), _step_chart(figures, plan)]
    return Section(
        key="training",
        title="Training strategy",
        blocks=[Paragraph(text=text), Paragraph(text=fit), *charts],
        points=[text, fit],
    )


def _memory_chart(figures: Figures, plan: TrainingPlan) -> Chart:
    names = [name for name, size in plan.prediction.memory.parts().items() if size > 0]
    limit = ("memory of a device", figures.amount("memory_limit")) if "memory_limit" in figures else None
    return Chart(
        caption="Memory per device",
        kind="bar",
        categories=[figures[f"memory_{name}"].label for name in names],
        series=[("bytes", [figures.amount(f"memory_{name}") for name in names])],
        limit=limit,
    )


def _step_chart(figures: Figures, plan: TrainingPlan) -> Chart:
    rows = [figure for figure in figures if figure.group == "Step time" and figure.value > 0]
    return Chart(
        caption="Time of a step",
        kind="bar",
        categories=[figure.label for figure in rows],
        series=[("seconds", [figures.amount(figure.key) for figure in rows])],
    )


def capacity_section(facts: PlanFacts, figures: Figures) -> Section | None:
    plan = facts.serving
    if plan is None:
        return None
    text = figures.say(
        "{requests_per_s} of {tokens_in} + {tokens_out} tokens need {replicas} of {replica}, {total} "
        "in all. A replica sustains {replica_rate} within the objectives; at the planned traffic the load is "
        "{replica_load}.",
        replicas="one replica" if plan.capacity.replicas == 1 else f"{plan.capacity.replicas:,} replicas",
        replica=f"{plan.chosen.split.text()} with {plan.chosen.dtypes.weights} weights",
        total=plural(plan.chosen.devices, "device"),
    )
    table = Table(
        caption="Capacity and service-level objectives",
        columns=("gauge", "predicted", "objective", "used", "met"),
        rows=[_objective_row(figures, name) for name in ("ttft_p50_s", "itl_p50_s", *LIMITS)],
    )
    chart = Chart(
        caption="Memory per serving device",
        kind="bar",
        categories=["Weights", "KV cache", "Working memory"],
        series=[("bytes", [figures.amount(f"serving_{name}") for name in ("weights", "kv", "working")])],
        limit=("memory of a device", figures.amount("serving_memory")),
    )
    return Section(
        key="capacity",
        title="Serving capacity and SLOs",
        blocks=[Paragraph(text=text), table, chart],
        points=[text],
    )


def _objective_row(figures: Figures, name: str) -> list[Cell]:
    label = figures[name].label
    key = f"slo_{name}"
    if key not in figures:
        return [label, figures.amount(name), "none", "–", "–"]
    used = figures.calculated(f"{name} / {key}", "share")
    met = figures.calculated(f"where({name} <= {key}, 1, 0)", "yes")
    return [label, figures.amount(name), figures.amount(key), used, met]


def reliability_section(facts: PlanFacts, figures: Figures) -> Section:
    blocks: list[Block] = []
    if facts.training is not None:
        lost = facts.training.goodput.lost()
        words = {"repeated": "repeated steps"}
        shares = ", ".join(f"{share * 100:.2f} % on {words.get(name, name)}" for name, share in lost.items())
        text = figures.say(
            "One failure is expected every {mtbf_all_s} on {count}. With a checkpoint every {interval_s}, which "
            "stops training for {checkpoint_s}, and restarts of {restart_s}, {goodput} of the time is useful; lost are "
            "{lost}.",
            lost=shares,
            count=plural(figures["devices"].value, "device"),
        )
        blocks.append(Paragraph(text=text))
        rows: list[list[Cell]] = [
            [figures[key].label, figures.amount(key), figures[key].source]
            for key in (
                "device_mtbf_h",
                "mtbf_all_s",
                "failures_per_day",
                "checkpoint_s",
                "restart_s",
                "interval_s",
                "goodput",
            )
        ]
        blocks.append(Table(caption="Failures and goodput", columns=("figure", "value", "source"), rows=rows))
    if facts.serving is not None:
        spare = facts.serving.capacity
        rest = (spare.replicas - 1) * spare.highest.requests_per_s
        needed = spare.server.traffic.total_per_s
        verdict = (
            "the others still sustain the traffic within the objectives"
            if rest >= needed
            else f"the others sustain {rest / needed * 100:.0f} % of the traffic within the objectives; one more would "
            "cover it"
        )
        text = f"If one of {spare.replicas:,} replicas fails, {verdict}."
        if spare.replicas == 1:
            text = "There is one replica: while it restarts, nothing is served. A second one would cover that."
        blocks.append(Paragraph(text=text))
    return Section(key="reliability", title="Reliability", blocks=blocks)


def operations_section(facts: PlanFacts, figures: Figures) -> Section:
    """What runs by itself, from the recipe's settings."""
    lines: list[str] = []
    if facts.training is not None:
        job = facts.recipe.train
        often = f"every {job.save_every:,} steps" if job.save_every else figures.say("about every {interval_s}")
        place = job.checkpoint_url or "the run's folder"
        lines += [
            f"Checkpoints: {often}, the newest {job.keep} are retained in {place}"
            + (", written while training continues." if job.checkpoint_async else "; training waits for them."),
            f"After a crash the run restarts from the newest checkpoint up to {job.max_restarts} times.",
            f"A hang is reported, then: {job.on_hang}; a loss spike: {job.on_spike}; values that are not finite: "
            f"{job.on_nonfinite}.",
            f"Metrics: gauges.jsonl in the run's folder{''.join(f', {name}' for name in job.track)}; validation "
            + (f"every {job.eval_every:,} steps." if job.eval_every else "at the end."),
        ]
    if facts.serving is not None:
        serve = facts.recipe.serve
        hung = f"{serve.hung_s:g} s of silence" if serve.hung_s else "no silence, however long"
        lines.append(f"A server drains for {serve.drain_s:g} s on SIGTERM and restarts an engine after {hung}.")
    if "staff" in figures and figures["staff"].value:
        lines.append(figures.say("Staff for owned devices: {staff} a year."))
    columns = ("event", "what happens by itself", "what a person does")
    runbook = Table(caption="Runbook", columns=columns, rows=[*_training_events(facts), *_serving_events(facts)])
    return Section(key="operations", title="Operations", blocks=[Bullets(texts=lines), runbook])


def _training_events(facts: PlanFacts) -> list[list[Cell]]:
    if facts.training is None:
        return []
    job = facts.recipe.train
    return [
        [
            "a rank crashes",
            f"restart from the newest checkpoint, {job.max_restarts} times",
            "reads the verdict: armillary runs",
        ],
        [
            "a rank hangs",
            f"rank, collective and source line are named; then: {job.on_hang}",
            "leaves the node out of the job",
        ],
        ["the loss jumps", job.on_spike, "looks at the samples that are named"],
        ["a loss is not finite", job.on_nonfinite, "resumes from a checkpoint before it"],
        ["steps are slower than planned", "measured beside planned, per part of a step", "armillary diagnose RUN"],
        ["a new kind of node", "–", "armillary launch --check, a canary run"],
    ]


def _serving_events(facts: PlanFacts) -> list[list[Cell]]:
    if facts.serving is None:
        return []
    serve = facts.recipe.serve
    hung = f"after {serve.hung_s:g} s without a sign of life" if serve.hung_s else "when its process has ended"
    return [
        ["an engine hangs or dies", f"it is restarted {hung}; the server stays up", "reads the log of the run"],
        ["an objective is missed", "–", "armillary diagnose URL; a replica more"],
        [
            "a new version of the model",
            "servers load it, then switch over",
            "armillary registry promote NAME:VERSION ALIAS",
        ],
        ["a version is worse", "–", "armillary registry rollback NAME ALIAS"],
    ]


def measured_section(facts: PlanFacts, figures: Figures) -> Section | None:
    """Every figure that the run's plan predicted, beside its measurement."""
    if not facts.run:
        return None
    rows: list[list[Cell]] = [[*row.cells()[1:]] for row in facts.measured]
    seen = [row for row in facts.measured if row.measured is not None]
    step = next((row for row in seen if row.gauge == "step_s" and row.error is not None), None)
    text = f"Run {facts.run}: {len(seen)} of {len(rows)} predicted figures were measured."
    if step is not None and step.error is not None and step.measured:
        text += (
            f" A step took {figures.notation.text(step.measured, 's')}; {figures.notation.text(step.predicted, 's')} "
            f"was predicted ({step.error * 100:+.1f} %)."
        )
    table = Table(caption="Measured next to planned", columns=("gauge", "predicted", "measured", "error"), rows=rows)
    blocks: list[Block] = [Paragraph(text=text), *([table] if rows else [])]
    return Section(key="measured", title="Measured next to planned", blocks=blocks, points=[text])
