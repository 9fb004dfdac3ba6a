"""fp8 training: what the rule says, losses beside fp32's, and the same run spread by FSDP and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from armillary.model.low_precision.fp8 import Fp8Linear
from armillary.parallel.world import join_world
from armillary.spec.fp8 import fp8_rule, stays_in_bf16
from armillary.spec.layout import Layout
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.training.loop import make_consensus
from armillary.training.trainer import Trainer
from tests.model.layers.test_attention_forms import small
from tests.ranks import Ranks
from tests.training.test_loop import alone, begin, losses

Make = Callable[..., Recipe]
STEPS = 8


@pytest.mark.parametrize("scaling", ["token", "tensor", pytest.param("row", marks=pytest.mark.slow)])
def test_losses_follow_those_of_fp32(scaling: str, recipe: Make, home: Home) -> None:
    plain = losses(recipe(), home, STEPS)
    narrow = losses(recipe("layout.precision=fp8", f"layout.fp8_scaling={scaling}"), home, STEPS)
    assert narrow != plain and narrow == pytest.approx(plain, rel=1e-2)
    assert narrow != losses(recipe("layout.precision=bf16"), home, STEPS)


def test_the_rule_is_printed_and_is_what_is_done(recipe: Make, home: Home) -> None:
    begun = begin(recipe("layout.precision=fp8", "layout.fp8_scaling=row", "model.ffn=72"), home)
    begun.prepare()
    (note,) = (note for note in begun.plan.notes if note.startswith("fp8"))
    assert "per-row scales" in note and "mlp.down (32 × 72 is not in multiples of 16)" in note and "head" in note
    with Trainer(begun.plan, alone()) as trainer:
        found = {name for name, module in trainer.model.named_modules() if type(module) is Fp8Linear}
    assert found == {f"blocks.{i}.attention.{name}" for i in (0, 1) for name in ("qkv", "out")} | {
        f"blocks.{i}.mlp.up" for i in (0, 1)
    }


def test_tp_and_adapters_are_part_of_the_rule() -> None:
    config = small(heads=8, kv_heads=4, hidden=64, ffn=64)
    assert not stays_in_bf16(config, Layout())
    assert list(stays_in_bf16(config, Layout(tp=8))) == ["attention.out", "mlp.down"]
    adapted = stays_in_bf16(config, Layout(), TrainJob(lora_rank=4, lora_on=("qkv",)))
    assert adapted == {"attention.qkv": "adapters"}
    experts = small(moe={"num_experts": 4, "top_k": 2, "ffn": 32})
    assert "mlp" not in fp8_rule(experts, Layout()) and "routers and experts" in fp8_rule(experts, Layout())


def on_ranks(plan: str, steps: int) -> list[float]:
    made = Plan.from_json(plan)
    with join_world("cpu") as world, Trainer(made, world, make_consensus(world)) as trainer:
        assert any(isinstance(module, Fp8Linear) for module in trainer.model.modules())
        reports = [trainer.step(step) for step in range(steps)]
    return [report.gauges["loss"] for report in reports if report is not None]


@pytest.mark.parametrize("layout", [pytest.param("layout.dp=2 layout.zero=3", marks=pytest.mark.slow), "layout.tp=2"])
def test_two_ranks_follow_one(layout: str, recipe: Make, home: Home, ranks: Ranks) -> None:
    """Weights are gathered in bf16 and rounded after; with tp each rank scales its own part. So sums of fp8 products
    differ a little, and losses with them."""
    settings = ("layout.precision=fp8", "layout.micro_batch=2")
    one = losses(recipe(*settings), home, 4)
    begun = begin_many(recipe(*settings, *layout.split()), home)
    first, second = ranks.run(2, on_ranks, begun, 4)
    assert first == second and first == pytest.approx(one, rel=3e-3)


def begin_many(recipe: Recipe, home: Home) -> str:
    from armillary.training.prepare_run import model_source, resolve_run

    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=2)
    begun.prepare()
    return begun.plan.to_json()
