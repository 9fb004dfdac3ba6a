"""What we ship to be copied works: every recipe passes the trainer's checks and fits, every example runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.cli.demo import state as demo
from armillary.cli.train.planning import plan_of
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home
from armillary.training.prepare_run import model_source, resolve_run
from tests.docs.exercise_relations import RELATIONS, tables
from tests.fork_server import ForkServer

ROOT = Path(__file__).parent.parent
SERVED = ("service", "long_prompts_8b_2xh200", "long_prompts_70b_8xh200")
"""recipes to serve: tests/cli/test_up.py and tests/planning/simulation/test_against_colocated.py"""
RECIPES = [*sorted(path for path in (ROOT / "recipes").glob("*.toml") if path.stem not in SERVED), demo.RECIPE]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans_fits_and_can_be_exported(path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name what we ship relative to it
    recipe = load_recipe(path)
    if recipe.model.path:  # needs a folder of one's own; a shape stands in for it
        recipe = load_recipe(path, ["model.name=armillary-2m"])
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=recipe.layout.num_devices)
    made = plan_of(begun)
    assert made.fits and made.plan().predicted["step_s"] > 0


EXAMPLES = {
    "python_api": ((), ("loss", "converted to half")),
    "ddp_scaling": (("--quick",), ("predicting", "| efficiency |", "crossover at", "time to 10%", "plot_2.svg")),
    "precision_cnn": (
        ("--quick",),
        ("| fp16 |", "| bf16 |", "loss scaler: 2^24", "first epoch adds", "plot_3.svg"),
    ),
    "pipeline_bubbles": (("--quick",), ("| formula | idle, GPipe | idle, 1F1B |", "| 4 | 20.0% |", "plot.svg")),
    "zero_memory": (("--quick",), ("predicted: ZeRO-3", "| DDP, fp32 |", "plot.svg")),
    "moe_balance": (("--quick",), ("| selection bias |", "8 devices busy", "plot_2.svg")),
    "simplicial_pairs": (("--quick",), ("| 2-simplicial, 1 layer |", "always the likelier", "plot_2.svg")),
    "checkpoint_chaos": (("--quick",), ("kill −9 to one rank: 1 command", "| 0 of ", "| yes |", "plot.svg")),
    "attention_roofline": (("--quick",), ("| 128 | naive |", "| 128 | tiled |", "| 128 | fused |", "plot.svg")),
    "amdahl": (("--quick",), ("optimizer: loop → one pass", "Karp and Flatt", "plot.svg")),
    "autoscaling": (("--quick",), ("one replica serves", "| 4 replicas |", "plot_2.svg")),
    "serving_speedups": (("--quick",), ("| prefix cache |", "| prompt lookup |", "plot.svg")),
    "plan_to_documents": (("--quick",), ("md, html, xlsx", "| device-hour | run |", "plot.svg")),
    "resnet50_profile": (("--quick",), ("ResNet-50 on cpu", "1. aten::", "memory peak", "plot.svg")),
}
"""example -> its arguments, and what it must print"""


def test_every_example_is_tried() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()}
    assert found == set(EXAMPLES)


SLOW = set(EXAMPLES) - {"python_api"}
"""exercises: they start processes that import torch, train, measure, sleep or plan"""


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in EXAMPLES])
def test_an_example_runs(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    arguments, printed = EXAMPLES[name]
    file = ROOT / "examples" / f"{name}.py"
    if name in SLOW:  # as a user runs it: some start processes that run the file once more
        program: tuple[str, ...] = (str(file),)
    else:
        program = ("-c", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')")
    ran = fork_server.start(arguments, tmp_path / "log", program=program, cwd=tmp_path)
    assert ran.wait(300) == 0, ran.err
    assert all(text in ran.out for text in printed), ran.out
    page = {"precision_cnn": "precision", "resnet50_profile": "resnet50"}.get(name, name)
    if page in RELATIONS:
        RELATIONS[page](tables(ran.out), False)
