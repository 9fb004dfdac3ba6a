"""All problems in the order of the rings, and healthy runs last."""

from __future__ import annotations

from collections.abc import Sequence

from armillary.errors import unknown
from tests.planted import healthy, inner, others, product, recorded, services, training
from tests.planted.problem import Problem

PROBLEMS: tuple[Problem, ...] = (
    *inner.PROBLEMS,
    *training.PROBLEMS,
    *product.PROBLEMS,
    *others.PROBLEMS,
    *services.PROBLEMS,
    *recorded.PROBLEMS,
    *healthy.PROBLEMS,
    *others.HEALTHY,
    *services.HEALTHY,
)


def chosen(names: Sequence[str]) -> list[Problem]:
    """Those of these names, or all."""
    by_name = {problem.name: problem for problem in PROBLEMS}
    for name in names:
        if name not in by_name:
            raise unknown("planted problem", name, by_name, where="--help lists them")
    return [by_name[name] for name in names] if names else list(PROBLEMS)
