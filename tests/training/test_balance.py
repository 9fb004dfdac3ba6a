"""Routers in training: a skewed one is brought into balance, by a loss or by a bias, the same on any cut of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from armillary.model.moe import MixtureOfExperts
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.start import start, starting_point
from armillary.training.trainer import Trainer
from tests.training.test_loop import alone

Make = Callable[..., Recipe]
GAUGES = ("aux_loss", "expert_load_max_over_mean", "expert_tail_fraction", "expert_drop_fraction", "router_entropy")
MIXTRAL = ("model.family=mixtral", "model.ffn=0", "model.moe_every=1", "model.moe.num_experts=8", "model.moe.top_k=2",
           "model.moe.ffn=16", "train.steps=300", "train.eval_every=0", "train.batch_tokens=512",
           "layout.micro_batch=16")  # fmt: skip
GLM = ("model.family=glm4_moe", "model.moe_every=1", "model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.ffn=16",
       "model.moe.shared_ffn=16", "model.moe.score=sigmoid", "model.moe.selection_bias=true", "train.steps=300",
       "train.eval_every=0", "train.batch_tokens=512", "layout.micro_batch=16")  # fmt: skip


def trainer(recipe: Recipe, home: Home) -> Trainer:
    begun = start(recipe, home, starting_point(recipe, home))
    begun.prepare()
    return Trainer(begun.plan, alone())


def skew(made: Trainer) -> None:
    """Two experts of every layer agree with all tokens: what the embedding has in common points their way."""
    model = made.model
    for mixture in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
        with torch.no_grad():
            mixture.router.weight[:2] *= 8.0
    with torch.no_grad():
        model.embedding.weight += 0.05  # type: ignore[union-attr]
        for mixture in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
            mixture.router.weight[:2] += 0.1


def steps(made: Trainer, count: int) -> list[dict[str, float]]:
    with made:
        return [made.step(step).gauges for step in range(count)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "how",
    [(*MIXTRAL, "train.balance_loss=0.1"), GLM],
    ids=["balance loss", "selection bias"],
)
def test_a_skewed_router_comes_into_balance(recipe: Make, home: Home, how: tuple[str, ...]) -> None:
    made = trainer(recipe(*how), home)
    skew(made)
    gauges = steps(made, 300)
    assert gauges[0]["expert_load_max_over_mean"] > 2.5
    last = [each["expert_load_max_over_mean"] for each in gauges[-20:]]
    assert sum(last) / len(last) <= 1.3


def test_without_either_it_stays_skewed(recipe: Make, home: Home) -> None:
    made = trainer(recipe(*MIXTRAL, "train.balance_loss=0"), home)
    skew(made)
    gauges = steps(made, 100)
    assert gauges[-1]["expert_load_max_over_mean"] > 1.6
    assert gauges[-1]["aux_loss"] == 0.0
