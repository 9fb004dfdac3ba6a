"""Every strategy trains as one process does: losses, gradient norms and weights, with accumulation and recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.training.parity.case import Case, Outcome, error, gpt_oss, latent, many, qwen3_next, simplicial, tiny
from armillary.training.parity.matrix import BARS, alone, refuses_selective
from armillary.training.parity.strategies import GPT_OSS, LATENT, QWEN3_NEXT, SIMPLICIAL, STRATEGIES, layout_of
from tests.ranks import Ranks


def check(found: list[Outcome], cases: list[Case]) -> None:
    for outcome, case in zip(found, cases, strict=True):
        errors = error(outcome, alone(case.alone()))
        over = {name: value for name, value in errors.items() if value > BARS[case.dtype][name]}
        assert not over, f"{case.layout}: {over}"


RECOMPUTES = {2: ("full", 1), 4: ("selective", 1), 8: ("full", 2)}


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_a_strategy_gives_what_one_process_gives(ranks: Ranks, world: int) -> None:
    """Each strategy on the smallest number of ranks it has a use for; test_matrix has all on all, for 20 steps."""
    kind, every = RECOMPUTES[world]
    chosen = [name for name in STRATEGIES if world == smallest(name)]
    layouts = [layout_of(name, world, recompute=kind, recompute_every=every) for name in chosen]
    cases = [Case(layout=x, accumulate=2, chunk=20, steps=2) for x in layouts if x is not None]
    check(ranks.run(world, many, cases)[0], cases)


def smallest(strategy: str) -> int:
    return next(world for world in (2, 4, 8) if layout_of(strategy, world) is not None)


SOME = {
    latent: ("latent: tp", "latent: tp + sp", "latent: cp"),
    gpt_oss: ("gpt-oss: tp + sp", "gpt-oss: ep × FSDP2"),
    qwen3_next: ("qwen3-next: tp", "qwen3-next: tp + sp", "qwen3-next: ep × FSDP2", "qwen3-next: pp (1F1B)"),
    simplicial: ("2-simplicial: tp + sp", "2-simplicial: ZeRO-3 (FSDP2)", "2-simplicial: pp (1F1B)"),
}
"""of each model; the others are slow"""


@pytest.mark.parametrize(
    ("model", "world", "names"),
    [
        *((model, 2, names) for model, names in SOME.items()),
        *(
            pytest.param(model, world, tuple(names), marks=pytest.mark.slow)
            for model, names in (
                (latent, LATENT),
                (gpt_oss, GPT_OSS),
                (qwen3_next, QWEN3_NEXT),
                (simplicial, SIMPLICIAL),
            )
            for world in (2, 4, 8)
        ),
    ],
)
def test_other_models_train_as_in_one_process(
    ranks: Ranks, model: Callable[[], ModelConfig], world: int, names: tuple[str, ...]
) -> None:
    """Each layout on the smallest number of ranks it has a use for; test_matrix has all on all, for 20 steps."""
    chosen = [name for name in names if world == smallest(name)]
    layouts = [selective(layout) for name in chosen if (layout := layout_of(name, world)) is not None]
    cases = [Case(layout=x, config=model(), dtype="fp64", accumulate=2 * x.pp, steps=2) for x in layouts]
    assert len(cases) >= len(SOME[model])
    check(ranks.run(world, many, cases, timeout_s=600)[0], cases)


def selective(layout: Layout) -> Layout:
    """With selective recompute, where the layout takes it: it repeats what a mixture does under FSDP's hooks."""
    return layout if refuses_selective(layout) else replace(layout, recompute="selective")


@pytest.mark.slow  # by default features and stages are compared in fp64
def test_in_fp64_nothing_but_rounding_is_left(ranks: Ranks) -> None:
    layouts = [layout_of(name, 4) for name in ("HSDP", "FSDP2 × tp", "tp + sp")]
    cases = [Case(layout=x, dtype="fp64", accumulate=2, steps=2) for x in layouts if x is not None]
    check(ranks.run(4, many, cases)[0], cases)


def test_a_wrong_sum_would_be_seen() -> None:
    case = Case(layout=layout_of("DDP", 2), steps=2)  # type: ignore[arg-type]
    right = alone(case.alone())
    wrong = Outcome(right.losses, [2 * norm for norm in right.norms], right.weights)
    with pytest.raises(AssertionError, match="norm"):
        check([wrong], [case])


def test_the_model_of_these_tests_is_uneven_where_it_may_be() -> None:
    assert tiny().vocab % 2 and tiny().vocab % 8
