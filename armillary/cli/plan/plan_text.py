"""A training plan for people: memory and step as stacked bars, throughput, what limits it, what it costs."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

import numpy as np

from armillary.cli.output import Output
from armillary.planning.cost.cost import offers
from armillary.planning.cost.cost_report import (
    OFFER_COLUMNS,
    STORAGE_COLUMNS,
    buying_rows,
    goodput_rows,
    offer_cells,
    storage_cells,
    training_rows,
)
from armillary.planning.cost.failures import Goodput
from armillary.planning.device_model.vectorised_layouts import OFFLOADS, take_rows
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.memory_breakdown import by_stage, memory
from armillary.planning.training.offload import host_adamw_s
from armillary.planning.training.search import limits
from armillary.planning.training.stages import stage_layers
from armillary.planning.training.training_plan import TrainingPlan
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout_rules.placement import placement
from armillary.spec.toml.fields import to_plain
from armillary.units import bytes_text, count_text, duration_text, flops_text, scaled, seconds_text

LABEL, WIDTH = 20, 118
GLUE = "\N{NO-BREAK SPACE}"
"""joins a figure with its name and unit where a line is wrapped; printed as a blank"""


def say_training(out: Output, plan: TrainingPlan, how: str, confidence: str = "") -> None:
    """The plan as a page; `how` says where the layout is from, `confidence` how far earlier plans were off."""
    prediction, problem = plan.prediction, plan.problem
    count = parameters(problem.model)
    width = min(WIDTH, get_terminal_size((WIDTH, 0)).columns)
    head = (
        f"{problem.model.name} on {problem.case.cluster.text()} · {count_text(count.total)} parameters, "
        f"{flops_text(prediction.model_flops)} per token"
    )
    out.say("\n".join(wrap(head, width)))
    rows = [
        ("layout", f"{prediction.layout_text()}{how}"),
        *((key.partition(".")[2], why) for key, why in plan.problem.chosen.items()),
        *_links(plan),
        ("memory / device", memory_text(prediction) + ("   fits" if plan.fits else "   does not fit")),
        ("", _bar(prediction.memory.parts(), prediction.memory_limit if plan.fits else None)),
        *offload_rows(prediction),
        ("step", step_text(prediction)),
        ("", _bar(prediction.time.shown_parts())),
        ("interval", interval_text(prediction)),
        ("throughput", throughput_text(prediction)),
        ("limit next", limit_text(prediction)),
        *([("confidence", confidence)] if confidence else []),
    ]
    rows += training_rows(plan.cost) if plan.cost else [("cost", plan.price_source)]
    rows += goodput_rows(plan.goodput) if problem.case.cluster.num_devices > 8 else []
    rows += [("note", note) for note in plan.notes()]
    for name, text in rows:
        out.say(line_text(name, text, width))


def _links(plan: TrainingPlan) -> list[tuple[str, str]]:
    """Which link each axis crosses, innermost first, where there are several kinds."""
    cluster = plan.problem.case.cluster
    words = placement(plan.prediction.layout(), cluster) if len(cluster.tiers) > 1 else []
    return [("links", ";  ".join(glued(each) for each in words))] if words else []


def line_text(name: str, text: str, width: int = WIDTH) -> str:
    """A label and its text, wrapped under itself."""
    lines = wrap(text, width - LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    line_and_rest = "\n".join([f"  {name:<{LABEL - 2}}{lines[0]}", *(" " * LABEL + line for line in lines[1:])])
    return line_and_rest.replace(GLUE, " ")


def glued(text: str) -> str:
    """`text` so that no line ends inside it."""
    return text.replace(" ", GLUE)


def _bar(parts: dict[str, float], total: float | None = None) -> str:
    """The stacked bar, its legend wrapped between parts."""
    bar, *legend = stacked_bar(parts, total).split("  ")
    return "  ".join([bar, *(glued(part) for part in legend)])


def say_stages(out: Output, prediction: Prediction) -> None:
    """Layers and memory of every pipeline stage, where there is more than one."""
    layouts = prediction.layouts.take(np.array([0]))
    stages, layers = by_stage(prediction.case, layouts), stage_layers(prediction.case, layouts)
    if len(stages) < 2:
        return
    names = list(stages[0].parts())
    cells = [
        [i, f"{layers[i]:g}", *(bytes_text(size) for size in stage.parts().values()), bytes_text(float(stage.total[0]))]
        for i, stage in enumerate(stages)
    ]
    out.table("\nmemory by pipeline stage", ["stage", "layers", *names, "all"], cells)


def memory_text(prediction: Prediction, i: int = 0) -> str:
    parts = "  ".join(
        glued(f"{name} {bytes_text(size)}") for name, size in prediction.memory.parts(i).items() if size > 0
    )
    return f"{parts}  " + glued(
        f"→ {bytes_text(float(prediction.memory.total[i]))} of {bytes_text(prediction.memory_limit)}"
    )


def offload_rows(prediction: Prediction, i: int = 0) -> list[tuple[str, str]]:
    """What offloading frees and what it costs; nothing where nothing is offloaded."""
    layout, single = prediction.layout(i), prediction.layouts.take(np.array([i]))
    if layout.offload == "none":
        return []
    before = memory(prediction.case, replace(single, offload=np.array([OFFLOADS.index("none")])))
    freed, size = float(before.total[0] - prediction.memory.total[i]), float(prediction.memory.host[i])
    where = "on disk" if layout.offload == "nvme" else "on the host"
    gain = f"frees {bytes_text(freed)}" if freed > 0 else "frees nothing"
    text = (
        f"{gain} of the device for {bytes_text(size)} {where}  the step waits "
        f"{seconds_text(float(prediction.time.offload[i]))} for it"
    )
    if layout.offload != "activations":
        seconds = host_adamw_s(prediction.case, single, take_rows(prediction.time.work.parameters, np.array([i])))
        text += f"  (AdamW there takes {seconds_text(float(seconds[0]))})"
    return [("offload", "  ".join(glued(part) for part in text.split("  ")))]


def interval_text(prediction: Prediction, i: int = 0) -> str:
    """'90 % of such steps take 1.1 s to 1.4 s'."""
    within = prediction.step_interval(i)
    return f"9 of 10 such steps take {duration_text(within.low)} to {duration_text(within.high)}"


def step_text(prediction: Prediction, i: int = 0) -> str:
    time = prediction.time
    compute, exposed, comm, bubble, overhead, total = (
        max(0.0, float(array[i]))
        for array in (time.compute, time.exposed, time.comm, time.bubble, time.overhead, time.total)
    )
    parts = (
        f"compute {duration_text(compute)}",
        f"comm exposed {duration_text(exposed)} of {duration_text(comm)}",
        f"bubble {duration_text(bubble)}",
        f"overhead {duration_text(overhead)}",
        f"→ {duration_text(total)}",
    )
    return "  ".join(glued(part) for part in parts)


def throughput_text(prediction: Prediction, i: int = 0) -> str:
    each = float(prediction.tokens_per_s[i]) / float(prediction.layouts.num_devices[i])
    return (
        f"{scaled(each)} tokens/s/device   {prediction.mfu[i] * 100:.0f} % MFU, {prediction.hfu(i) * 100:.0f} % HFU "
        f"(6·N, causal attention as half, of the dense 16-bit peak)   ceilings: {prediction.case.curves.source}"
    )


def limit_text(prediction: Prediction, i: int = 0) -> str:
    """The two largest parts of the step and what doubling their speed would gain."""
    return ", then ".join(
        f"{row.work}: twice as fast buys " + glued(f"{row.doubled:.2f} ×") for row in limits(prediction.time, i)[:2]
    )


SHADES = "█▓▒░▚▞◆○"


def stacked_bar(parts: Mapping[str, float], full: float | None = None, width: int = 50) -> str:
    """The parts in order, then the legend: '████▓▓▒····  █ weights 40 %  ▓ gradients 20 % …'; dots are what is free."""
    total = full or sum(parts.values())
    if total <= 0:
        return ""
    shown = [(name, value) for name, value in parts.items() if value / total >= 0.005]
    shades = {name: SHADES[i % len(SHADES)] for i, (name, _) in enumerate(shown)}
    ends = [round(width * end / total) for end in accumulate(value for _, value in shown)]
    cells = [min(end, width) - min(begin, width) for begin, end in pairwise([0, *ends])]
    bar = "".join(shades[name] * count for (name, _), count in zip(shown, cells, strict=True))
    free = "·" * (width - len(bar)) if full else ""
    legend = "  ".join(f"{shades[name]} {name} {value / total * 100:.0f} %" for name, value in shown)
    return f"{bar}{free}  {legend}"


def say_money(out: Output, plan: TrainingPlan) -> None:
    """Offers, buying, failures and storage."""
    cluster, cost = plan.problem.case.cluster, plan.problem.recipe.cost
    if plan.cost is not None:
        out.table("\nprice per device and hour", OFFER_COLUMNS, [offer_cells(offer) for offer in offers(cost, cluster)])
        out.fields("", buying_rows(cost, cluster))
    out.fields("\nfailures", goodput_rows(plan.goodput))
    out.table("\nstorage", STORAGE_COLUMNS, storage_cells(plan.storage(), cluster))


def money_plain(plan: TrainingPlan) -> dict[str, Any]:
    """The same for --json."""
    cluster, cost = plan.problem.case.cluster, plan.problem.recipe.cost
    goodput: Goodput = plan.goodput
    return {
        "offers": [to_plain(offer) for offer in offers(cost, cluster)] if plan.cost is not None else [],
        "failures": {
            "mtbf_s": goodput.failures.mtbf_s,
            "interval_s": goodput.interval_s,
            "young_s": goodput.young_s,
            "daly_s": goodput.daly_s,
            "goodput_fraction": goodput.goodput_fraction,
            "lost": goodput.lost(),
        },
        "storage": [to_plain(need) for need in plan.storage().needs],
    }
