"""Memory of a training step on layouts of CPU ranks: what the tracker saw on the fullest rank beside the plan."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from armillary.parallel.world import join_world
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.resolve_recipe import resolve
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.training.loop import make_consensus
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.telemetry.step_telemetry import MEASURED_STEP
from armillary.training.trainer import Trainer
from tests.ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "memory_agreement.md"
BAR = 0.07
MODELS: dict[str, dict[str, Any]] = {
    "4 × 128, vocabulary 2048": dict(num_layers=4, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=384, vocab=2048),
    "6 × 192, vocabulary 320": dict(num_layers=6, hidden=192, heads=8, kv_heads=8, head_dim=24, ffn=512, vocab=320),
    "2 × 512, untied": dict(
        num_layers=2, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1536, vocab=4096, tied=False
    ),
}
"""where logits, activations and weights decide"""
TRAIN = {"2 × 512, untied": dict(sequence=32, batch_tokens=32 * 16)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": dict(dp=2),
    "ZeRO-1": dict(dp=2, zero=1),
    "ZeRO-2": dict(dp=2, zero=2),
    "ZeRO-3": dict(dp=2, zero=3),
    "tp": dict(tp=2, sequence_parallel=False),
    "tp + sp": dict(tp=2),
    "ZeRO-3 on 4": dict(dp=4, zero=3),
    "HSDP": dict(dp=4, zero=3, shard=2),
    "tp + sp on 4": dict(tp=4),
    "ZeRO-3 × tp": dict(dp=2, zero=3, tp=2),
    "optimiser out": dict(offload="optimizer"),
    "activations out": dict(offload="activations"),
    "both out": dict(offload="both"),
    "nvme": dict(offload="nvme"),
    "ZeRO-3, both out": dict(dp=2, zero=3, offload="both"),
    "LoRA": dict(lora_rank=8),
    "LoRA, ZeRO-1": dict(lora_rank=8, dp=2, zero=1),
    "LoRA, ZeRO-3": dict(lora_rank=8, dp=2, zero=3),
    "LoRA, tp + sp": dict(lora_rank=8, tp=2),
}
"""settings of the layout, and of the job where adapters are trained"""


@dataclass(frozen=True)
class Case:
    """A model on a layout."""

    model: str
    layout: str
    recompute: str = "none"
    precision: str = "fp32"

    def recipe(self, corpus: Path) -> Recipe:
        shape = {"name": "armillary-2m", "context": 512} | MODELS[self.model]
        if self.layout == "tp + sp on 4" and shape["kv_heads"] < 4:
            shape["kv_heads"] = 4
        train = {"sequence": 128, "batch_tokens": 2048, "steps": 3, "eval_every": 0, "profile_every": 0}
        layout = {"micro_batch": 4, "recompute": self.recompute, "precision": self.precision} | LAYOUTS[self.layout]
        train["lora_rank"] = layout.pop("lora_rank", 0)
        return recipe_from_dict(
            {
                "model": shape,
                "hardware": {"on": "here"},
                "data": {"source": str(corpus), "vocab": 320},
                "layout": layout,
                "train": train | TRAIN.get(self.model, {}),
            }
        )


@dataclass(frozen=True)
class Row:
    """One case with both figures, in bytes."""

    case: Case
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def every_case(model: str, *, elsewhere: bool) -> Iterator[Case]:
    """Those in which something waits elsewhere, or the others."""
    for layout in (name for name, given in LAYOUTS.items() if ("offload" in given) == elsewhere):
        reached = LAYOUTS[layout].get("offload") not in ("activations", "both")
        for recompute in ("none", "selective", "full") if reached else ("none", "full"):
            yield Case(model, layout, recompute)
        yield Case(model, layout, "none", "bf16")
        yield Case(model, layout, "full", "bf16")


def rows(ranks: Ranks, cases: Sequence[Case], home: Home, corpus: Path) -> list[Row]:
    """Every case, those of one number of ranks in one call of the pool."""
    plans, predicted, found = {}, {}, {}
    for case in cases:
        recipe = case.recipe(corpus)
        begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
        begun.prepare()
        plans[case] = begun.plan
        asked = resolve(recipe, begun.plan.model, begun.plan.cluster, home)
        predicted[case] = float(memory(asked.case, as_arrays([recipe.layout])).allocated[0])
    for world in sorted({plan.layout.num_devices for plan in plans.values()}):
        mine = [case for case, plan in plans.items() if plan.layout.num_devices == world]
        answers = ranks.run(world, peaks, [plans[case].to_json() for case in mine], timeout_s=900)
        found |= {case: max(each[i] for each in answers) for i, case in enumerate(mine)}
    return [Row(case, found[case], predicted[case]) for case in cases]


def peaks(plans: list[str]) -> list[float]:
    """On this rank, of each plan: most bytes that were alive during a step."""
    return [peak(Plan.from_json(plan)) for plan in plans]


def peak(plan: Plan) -> float:
    torch.manual_seed(0)
    with (
        join_world("cpu") as world,
        Trainer(plan, world, make_consensus(world), folder=Path(tempfile.gettempdir())) as trainer,
    ):
        for step in range(MEASURED_STEP + 1):
            report = trainer.step(step)
    assert report is not None
    names = [name for name, source in report.sources.items() if source == "tracker"]
    return sum(report.gauges[name] for name in names)


def table(found: Sequence[Row]) -> str:
    lines = ["| model | layout | recompute | format | measured | planned | error |", "|---|---|---|---|--:|--:|--:|"]
    for row in found:
        case = row.case
        figures = f"{row.measured / 1e6:.1f} MB | {row.predicted / 1e6:.1f} MB | {row.error:+.1%}"
        lines.append(f"| {case.model} | {case.layout} | {case.recompute} | {case.precision} | {figures} |")
    return "\n".join(lines) + "\n"


def page(text: str, found: Sequence[Row]) -> str:
    """The page with these rows in place of those of the same cases; `text` is the page as it is."""
    heads, *new = _split(table(found))
    old = [line for line in text.splitlines() if line.endswith("% |")]
    lines = sorted(({_case(line): line for line in [*old, *new]}).values(), key=_place)
    errors = [abs(float(line.split(" | ")[-1].strip("% |"))) for line in lines]
    return (
        "# Planned memory against a tracker\n\n"
        "Written by `pytest -m slow tests/training/telemetry/test_memory_gauges.py`, one model per test, last on "
        f"{datetime.date.today()}, torch {torch.__version__}, CPU ranks over gloo. "
        "Measured: most bytes alive at once on the fullest rank in one step, every tensor that operators "
        "make included. Planned: what `armillary plan` says a device allocates. "
        f"{len(lines)} configurations, mean error {sum(errors) / len(errors):.1f} %, worst {max(errors):.1f} %; bar "
        f"{BAR:.0%}.\n\n" + "\n".join([heads, *lines]) + "\n"
    )


def _case(line: str) -> tuple[str, ...]:
    """Model, layout, recompute and format of a row."""
    return tuple(cell.strip("| ") for cell in line.split(" | ")[:4])


def _place(line: str) -> tuple[int, int]:
    model, layout, *_ = _case(line)
    return list(MODELS).index(model), list(LAYOUTS).index(layout)


def _split(made: str) -> list[str]:
    """Both heading lines as one, then the rows."""
    first, second, *others = made.splitlines()
    return [f"{first}\n{second}", *others]
