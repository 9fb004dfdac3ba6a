"""A small mixture of experts trained with and without balancing: loss, load of the experts and dropped tokens by step.

    python examples/moe_balance.py             two minutes; writes moe_balance/table.md and two plots
    python examples/moe_balance.py --quick     a few steps of two settings

The same model, text and seed each time; only what keeps the router in balance differs. docs/exercises/moe_balance.md
says what to predict first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from exercise import finish, read_options, table

import armillary
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.moe.router_losses import Counts
from armillary.parallel.world import World
from armillary.report.bars import series_bars
from armillary.report.charts import lines, share_text
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.trainer import Trainer
from armillary.units import seconds_text

EXPERTS, TOP_K = 8, 2
OFF = {"balance_loss": 0.0, "bias_rate": 0.0}
SETTINGS: dict[str, dict[str, float]] = {
    "nothing": OFF,
    "auxiliary loss, 0.01": OFF | {"balance_loss": 0.01},
    "auxiliary loss, 0.1": OFF | {"balance_loss": 0.1},
    "selection bias": OFF | {"bias_rate": 0.005},
    "nothing, capacity 1.25": OFF | {"expert_capacity": 1.25},
    "selection bias, capacity 1.25": OFF | {"bias_rate": 0.005, "expert_capacity": 1.25},
}
"""what differs in [train]; the last two drop choices beyond 1.25 times an expert's fair share of a sequence"""
DRAWN = tuple(SETTINGS)[:4]
AVERAGED = 20
"""last steps, of which the table has the mean"""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Gauges of every step, and each expert's share of the choices at the end, in the worst layer, in order."""

    gauges: list[Mapping[str, float]]
    shares: list[float]
    seconds: float

    def last(self, gauge: str) -> float:
        return statistics.mean(step[gauge] for step in self.gauges[-AVERAGED:])

    def worst(self, gauge: str) -> float:
        return max(step[gauge] for step in self.gauges)

    def points(self, gauge: str, over: int = 5) -> list[tuple[float, float]]:
        """Means over a few steps, so that lines can be told apart."""
        values = [step[gauge] for step in self.gauges]
        return [
            (float(i + over), statistics.mean(values[i : i + over])) for i in range(0, len(values) - over + 1, over)
        ]


def recipe(setting: dict[str, float], steps: int) -> Recipe:
    """Two layers of eight experts of which a token uses two, beside a shared one, as in DeepSeek-V3."""
    moe = {"num_experts": EXPERTS, "top_k": TOP_K, "ffn": 64, "shared_ffn": 64, "score": "sigmoid"}
    shape = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 0, "moe_every": 1}
    rows = {"sequence": 64, "batch_tokens": 1024, "steps": steps, "lr": 3e-3}
    return recipe_from_dict(
        {
            "model": {"name": "armillary-2m", "family": "glm4_moe", "vocab": 512, "context": 128}
            | shape
            | {"moe": moe | {"selection_bias": True}},
            "hardware": {"on": "here"},
            "data": {"source": str(Path(armillary.__file__).parent / "spec"), "vocab": 512},
            "layout": {"precision": "fp32", "micro_batch": 16},
            "train": rows | {"eval_every": 0, "profile_every": 0, "compile": False} | setting,
        }
    )


def train(setting: dict[str, float], steps: int, home: Home) -> Trained:
    wanted = recipe(setting, steps)
    run = resolve_run(wanted, home, model_source(wanted, home))
    run.prepare()
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    begin, gauges = time.perf_counter(), []
    with Trainer(run.plan, alone) as trainer:
        for step in range(steps):
            report = trainer.step(step)
            assert report is not None
            gauges.append(report.gauges)
        return Trained(gauges=gauges, shares=shares(trainer), seconds=time.perf_counter() - begin)


def shares(trainer: Trainer) -> list[float]:
    """Of the choices of the last step, in the layer whose busiest expert has most."""
    loads = []
    for module in trainer.model.modules():
        if isinstance(module, MixtureOfExperts) and module.balance is not None:
            loads.append(module.balance.tally[Counts(EXPERTS).load])
    worst = max(loads, key=lambda load: float(load.max()))
    return sorted((worst / worst.sum()).tolist(), reverse=True)


def main() -> None:
    options = read_options("moe_balance", __doc__)
    steps = 8 if options.quick else 200
    torch.set_num_threads(1)  # more would wait for each other longer than such small GEMMs take
    names = ("nothing", "selection bias") if options.quick else tuple(SETTINGS)
    found: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = train(SETTINGS[name], steps, Home.at(Path(folder)))
            print(f"{name}: loss {found[name].last('loss'):.3f} after {steps} steps", flush=True)
    rows = [
        (
            name,
            f"{made.last('loss'):.3f}",
            f"{made.worst('expert_load_max_over_mean'):.2f}",
            f"{made.last('expert_load_max_over_mean'):.2f}",
            f"{1 / made.last('expert_load_max_over_mean'):.0%}",
            f"{made.last('expert_tail_fraction'):.0%}",
            f"{made.last('expert_drop_fraction'):.1%}",
            seconds_text(made.seconds / steps),
        )
        for name, made in found.items()
    ]
    heads = ("balanced by", "loss", "busiest expert / mean: worst", "at the end", f"{EXPERTS} devices busy")
    heads += ("experts nearly unused", "choices dropped", "step")
    text = f"{steps} steps, {EXPERTS} experts, {TOP_K} per token; means of the last {AVERAGED} steps:\n\n"
    text += table(heads, rows)
    drawn = {name: found[name] for name in DRAWN if name in found}
    load = lines(
        [(name, made.points("expert_load_max_over_mean")) for name, made in drawn.items()],
        label="Load of the busiest expert over the mean, by step",
        x_name="step (busiest expert over the mean: 1 is even, 4 is all tokens on two of eight)",
    )
    chosen = series_bars(
        [
            (f"expert {i + 1}", [made.shares[i] for made in drawn.values()])
            for i in ((0, EXPERTS - 1) if options.quick else range(EXPERTS))
        ],
        tuple(drawn),
        label="Share of the choices of each expert",
        text=share_text,
    )
    label = "share of the choices by expert in the last step, in the layer with the busiest one, sorted"
    finish(options, text, load, "load of the busiest expert over the mean, by step", (chosen, label))


if __name__ == "__main__":
    main()
