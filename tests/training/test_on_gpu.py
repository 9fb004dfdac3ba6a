"""Training on a GPU follows the CPU's losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.loop import Trainer
from armillary.training.precision import numerics
from armillary.training.start import train_recipe
from tests.training.test_loop import begin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def losses(recipe: Recipe, home: Home, device: str) -> list[float]:
    begun = begin(recipe, home)
    begun.prepare()
    with numerics(tf32=recipe.layout.precision == "tf32", deterministic=False):
        trainer = Trainer(begun.plan, device=torch.device(device))
        return [trainer.step(step).gauges["loss"] for step in range(8)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 2e-2)])
def test_losses_follow_the_cpu_s(precision: str, tolerance: float, recipe: Callable[..., Recipe], home: Home) -> None:
    cpu = losses(recipe("layout.precision=fp32"), home, "cpu")
    assert losses(recipe(f"layout.precision={precision}"), home, "cuda") == pytest.approx(cpu, rel=tolerance)


@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own code
def test_a_compiled_run_on_the_gpu(recipe: Callable[..., Recipe], home: Home) -> None:
    plain, compiled = (losses(recipe(f"train.compile={on}"), home, "cuda") for on in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4)
    done = train_recipe(recipe("train.steps=3"), home=home, device="cuda")
    assert done.finished
