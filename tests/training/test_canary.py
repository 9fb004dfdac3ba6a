"""The canary: the same run gives the same bits, another layout the same values up to rounding."""

from __future__ import annotations

from collections.abc import Callable

from armillary.cli.output import Output
from armillary.cli.train.canary import canary_rank
from armillary.spec.recipe import Recipe
from armillary.spec.toml.fields import build
from armillary.store.canary import CanaryRecord, compare
from armillary.store.home import Home
from armillary.training.prepare_run import model_source, resolve_run
from tests.ranks import Ranks

Make = Callable[..., Recipe]


def run_rank(plan: str) -> CanaryRecord:
    return build(CanaryRecord, canary_rank({"plan": plan, "steps": 4, "device": "cpu"}, Output("silent")), "canary")


def plan_of(recipe: Recipe, home: Home) -> str:
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=2)
    begun.prepare()
    return begun.plan.to_json()


def test_bits_are_equal_and_other_layouts_close(recipe: Make, home: Home, ranks: Ranks) -> None:
    same = ("train.deterministic=true", "train.compile=false")
    alone = plan_of(recipe(*same), home)
    golden = run_rank(alone)
    assert compare(golden, run_rank(alone)).agreement == "equal"
    several = ranks.run(2, run_rank, plan_of(recipe(*same, "layout.dp=2", "layout.zero=3"), home))
    verdict = compare(golden, several[0])
    assert verdict.agreement == "close", verdict.text
    assert verdict.changed["code"] == verdict.changed["versions"] == () and "dp=2" in str(verdict.changed["device"])
