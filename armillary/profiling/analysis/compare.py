"""Comparison of two profiles (eager and compiled, before and after), per step: budgets, kernels and operators."""

from collections.abc import Iterable
from dataclasses import dataclass

from armillary.profiling.profile import BUDGET, Profile, Row

_NO_ROW = Row(name="", kind="operator", calls=0)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part of the budget, kernel or operator; seconds and calls are those of one step, 0 where it does not
    occur."""

    name: str
    before_s: float
    after_s: float
    before_calls: float = 0.0
    after_calls: float = 0.0

    @property
    def saved_s(self) -> float:
        """Negative: it got slower."""
        return self.before_s - self.after_s

    @property
    def speedup(self) -> float | None:
        """None where it occurs in one profile only."""
        return self.before_s / self.after_s if self.before_s and self.after_s else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What changed between two profiles, the largest change first; kernels are operators where there are none."""

    before: str
    after: str
    before_step_s: float
    after_step_s: float
    budget: tuple[Change, ...]
    kernels: tuple[Change, ...]
    operators: tuple[Change, ...]

    @property
    def speedup(self) -> float:
        return self.before_step_s / self.after_step_s if self.after_step_s else float("inf")


def compare(before: Profile, after: Profile) -> Comparison:
    operators = _changes(before.operators, after.operators, before.steps, after.steps)
    kernels = _changes(before.kernels, after.kernels, before.steps, after.steps)
    return Comparison(
        before=before.source,
        after=after.source,
        before_step_s=before.step_s,
        after_step_s=after.step_s,
        budget=tuple(
            Change(
                name=part,
                before_s=before.budget.get(part, 0.0) / before.steps,
                after_s=after.budget.get(part, 0.0) / after.steps,
            )
            for part in BUDGET
        ),
        kernels=kernels if before.kernels and after.kernels else operators,
        operators=operators,
    )


def _changes(before: Iterable[Row], after: Iterable[Row], steps_before: int, steps_after: int) -> tuple[Change, ...]:
    old, new = {row.name: row for row in before}, {row.name: row for row in after}
    changes = [
        Change(
            name=name,
            before_s=old.get(name, _NO_ROW).seconds / steps_before,
            after_s=new.get(name, _NO_ROW).seconds / steps_after,
            before_calls=old.get(name, _NO_ROW).calls / steps_before,
            after_calls=new.get(name, _NO_ROW).calls / steps_after,
        )
        for name in {**old, **new}
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.saved_s)))
