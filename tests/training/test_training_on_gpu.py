"""Training on a GPU: the CPU's losses in every precision, exact resumption, and what is measured there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from armillary.spec.gauges import GAUGES
from armillary.spec.recipe import Recipe
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.telemetry.step_telemetry import StepReport
from tests.training.checkpoint.test_checkpoint import Cut
from tests.training.checkpoint.test_checkpoint import losses as written
from tests.training.test_loop import losses

pytestmark = pytest.mark.gpu
Make = Callable[..., Recipe]
STILL = "train.deterministic=true"
"""no kernel is chosen by timing, which takes longer than these runs"""


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_losses_follow_the_cpu_s(precision: str, tolerance: float, recipe: Make, home: Home) -> None:
    cpu = losses(recipe("layout.precision=fp32"), home, 8)
    gpu = losses(recipe(f"layout.precision={precision}", STILL), home, 8, "cuda")
    assert gpu == pytest.approx(cpu, rel=tolerance)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_layers_give_the_same_losses(kind: str, recipe: Make, home: Home) -> None:
    plain, again = (losses(recipe(f"layout.recompute={how}", STILL), home, 6, "cuda") for how in ("none", kind))
    assert again == pytest.approx(plain, rel=1e-5)


@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own code
def test_compiled_blocks_give_the_same_losses(recipe: Make, home: Home) -> None:
    plain, compiled = (losses(recipe(f"train.compile={on}"), home, 4, "cuda") for on in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_cut_off_goes_on_with_the_same_bits(precision: str, recipe: Make, home: Home) -> None:
    made = recipe("train.steps=9", "train.save_every=3", f"layout.precision={precision}", STILL)
    begun = resolve_run(made, home, model_source(made, home))
    begun.prepare()
    whole, cut = begun.create_run(), begun.create_run()
    train(begun.plan, whole, device="cuda")

    def watch(report: StepReport) -> None:
        if report.step == 6:
            raise Cut

    with pytest.raises(Cut):
        train(begun.plan, cut, device="cuda", watch=watch)
    assert train(begun.plan, cut, device="cuda").resumed_at == 6
    assert written(cut) == written(whole)


def test_what_is_measured_on_a_gpu(recipe: Make, home: Home) -> None:
    made = recipe("train.steps=6", "train.profile_every=3", "layout.precision=bf16", STILL)
    begun = resolve_run(made, home, model_source(made, home))
    begun.prepare()
    run = begun.create_run()
    train(begun.plan, run, device="cuda")
    records = list(read_gauges(run.gauges))
    for record in records:
        assert set(record["source"]) == set(record) & set(GAUGES)
        assert record["source"]["memory_peak_bytes"] == "allocator" and record["memory_reserved_bytes"] > 0
    parts = {name: value for name, value in records[1].items() if name.startswith("memory_")}
    assert parts["memory_optimizer_bytes"] == pytest.approx(2 * parts["memory_master_bytes"], rel=0.01)
    assert parts["memory_activations_bytes"] > 0
    categories = ("weights", "master", "optimizer", "gradients", "activations", "loss")
    together = sum(parts.get(f"memory_{name}_bytes", 0.0) for name in categories)
    assert together == pytest.approx(parts["memory_peak_bytes"], rel=0.02)
    split = records[2]
    total = split["compute_s"] + split["comm_exposed_s"] + split["bubble_s"] + split["overhead_s"]
    assert split["source"]["compute_s"] == "profiler window" and total > 0
