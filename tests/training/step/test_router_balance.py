"""Routers in training: a skewed one is brought into balance, by a loss or by a bias, the same on any cut of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.errors import ArmillaryError
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind
from armillary.spec.recipe import ModelTable, Recipe
from armillary.store.home import Home
from armillary.training.loop import train
from armillary.training.parity.case import Case, many
from armillary.training.parity.case import mixture as tiny_mixture
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.trainer import Trainer
from tests.ranks import Ranks
from tests.training.test_loop import alone
from tests.training.test_many_ranks import begin, losses, on_ranks

Make = Callable[..., Recipe]
GAUGES = ("aux_loss", "expert_load_max_over_mean", "expert_tail_fraction", "expert_drop_fraction", "router_entropy")
LONG = ("train.steps=300", "train.eval_every=0", "train.batch_tokens=512", "layout.micro_batch=16")
EIGHT = ("model.num_layers=1", "model.moe_every=1", "model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.ffn=16")
MIXTRAL = (*EIGHT, "model.family=mixtral", "model.ffn=0")
GLM = (
    *EIGHT,
    "model.family=glm4_moe",
    "model.moe.shared_ffn=16",
    "model.moe.score=sigmoid",
    "model.moe.selection_bias=true",
)


def trainer(recipe: Recipe, home: Home) -> Trainer:
    begun = resolve_run(recipe, home, model_source(recipe, home))
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
    ("how", "count"),
    [
        pytest.param((*MIXTRAL, *LONG, "train.balance_loss=0.1"), 300, marks=pytest.mark.slow),
        pytest.param((*GLM, *LONG), 300, marks=pytest.mark.slow),
        ((*GLM, *LONG, "train.bias_rate=0.005"), 170),
    ],
    ids=["balance loss", "selection bias", "selection bias, faster"],
)
def test_a_skewed_router_comes_into_balance(recipe: Make, home: Home, how: tuple[str, ...], count: int) -> None:
    made = trainer(recipe(*how), home)
    skew(made)
    gauges = steps(made, count)
    assert gauges[0]["expert_load_max_over_mean"] > 2.5
    last = [each["expert_load_max_over_mean"] for each in gauges[-20:]]
    assert sum(last) / len(last) <= 1.3


def test_gauges_are_numbers_where_no_gradient_passes_the_experts() -> None:
    layers = (LayerKind(mlp="moe"), LayerKind())  # adapters on the second layer's MLP alone
    (outcome,) = many([Case(layout=Layout(), config=tiny_mixture(layers=layers), steps=1, lora=2, lora_on=("down",))])
    assert set(outcome.gauges[0]) == set(GAUGES)
    assert all(value == value for value in outcome.gauges[0].values())


def test_without_either_it_stays_skewed(recipe: Make, home: Home) -> None:
    made = trainer(recipe(*MIXTRAL, *LONG, "train.balance_loss=0"), home)
    skew(made)
    gauges = steps(made, 60)
    assert gauges[-1]["expert_load_max_over_mean"] > 1.6
    assert gauges[-1]["aux_loss"] == 0.0


SHORT = [
    ["layout.dp=2", "layout.ep=2", "layout.zero=3", "layout.micro_batch=2"],
    ["layout.pp=2", "layout.micro_batch=2"],
    ["layout.dp=1"],
]
CHAIN = [
    ["layout.dp=1"],
    ["layout.dp=2", "layout.ep=2"],
    ["layout.tp=2"],
    ["layout.dp=2", "layout.ep=2", "layout.zero=3", "layout.micro_batch=2"],
    ["layout.pp=2", "layout.micro_batch=2"],
    ["layout.cp=2", "layout.ep=2"],
    ["layout.dp=1", "layout.recompute=full"],
]
LONGER = [
    ["layout.dp=2", "layout.pp=2", "layout.ep=2", "layout.micro_batch=2"],
    ["layout.dp=2", "layout.cp=2", "layout.ep=4", "layout.micro_batch=2"],
    ["layout.dp=2", "layout.tp=2", "layout.ep=2", "layout.zero=3", "layout.micro_batch=2"],
    ["layout.pp=2", "layout.cp=2", "layout.ep=2", "layout.schedule=zero_bubble", "layout.micro_batch=2"],
    ["layout.dp=4", "layout.ep=2", "layout.zero=2", "layout.micro_batch=1"],
]
"""on four ranks"""


def decided(recipe: Recipe, home: Home, folder: Path) -> ModelTable:
    """The recipe's model with routers that have an opinion: a fresh one's scores are so alike that rounding decides."""
    model = build(begin(recipe, home).plan.model, dtype=torch.float32, device="cpu", seed=0)
    for mixture in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
        mixture.router.weight.data *= 20.0
    return ModelTable(path=str(save_model(model, folder)))


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(SHORT, marks=pytest.mark.slow),
        pytest.param(CHAIN, marks=pytest.mark.slow),
        pytest.param([*LONGER, *CHAIN], marks=pytest.mark.slow),
    ],
    ids=["short", "two ranks", "four ranks"],
)
def test_a_run_of_experts_goes_on_on_any_layout(
    recipe: Make, home: Home, ranks: Ranks, tmp_path: Path, chain: list[list[str]]
) -> None:
    """Weights, optimiser states and selection biases are saved under one layout and loaded under another."""
    job = [
        f"train.steps={2 * len(chain)}",
        "train.eval_every=0",
        "train.balance_loss=0.01",
        "train.expert_capacity=1.25",
        "train.router_z_loss=1e-3",
    ]
    model = decided(recipe(*GLM), home, tmp_path / "model")

    def made(*overrides: str) -> Recipe:
        return replace(recipe(*job, *overrides), model=model)

    reference = begin(made(), home)
    whole = train(reference.plan, reference.create_run())
    run, at = reference.create_run(), 0
    for number, layout in enumerate(chain):
        last = number + 1 == len(chain)
        begun = begin(made(*layout), home)
        at, _, finished, _ = on_ranks(ranks, begun, run, *([] if last else [at]))[0]
        assert finished == last
    assert losses(run) == pytest.approx(losses(whole.run), rel=1e-6)
    exports = (run.latest_export(), whole.export)
    ours, theirs = (load_model(folder).state_dict() for folder in exports if folder)
    for name, expected in theirs.items():
        assert torch.dist(ours[name], expected) <= 1e-5 * expected.norm(), name
    assert theirs["blocks.0.mlp.router.selection_bias"].any()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["layout.dp=2", "layout.tp=2", "layout.ep=4"], "ep=4 does not divide dp × cp = 2 .*try --set layout.ep=2"),
        (["layout.dp=3", "layout.ep=3"], "ep=3 does not divide 8 experts"),
        (["train.expert_capacity=0"], "expert_capacity=0.* must be above 0"),
        (["train.balance_loss=-1"], "balance_loss=-1.* must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(recipe: Make, home: Home, overrides: list[str], says: str) -> None:
    with pytest.raises(ArmillaryError, match=says):
        begin(recipe(*MIXTRAL, *overrides), home)
