"""Checks shared by the recipe's tables: each error names the field and a valid value."""

from math import isfinite
from typing import Any

from armillary.errors import BadRecipe


def refuse(job: Any, table: str, name: str, rule: str, better: Any = None) -> BadRecipe:
    """An error that suggests `better`, or the field's default, which is always valid."""
    default = getattr(type(job), name) if better is None else better
    shown = "none" if default is None else default
    return BadRecipe(f"{table}.{name}={getattr(job, name)} must be {rule}; try --set {table}.{name}={shown}")


def at_least(job: Any, table: str, low: float, *names: str) -> None:
    """Each is finite and at least `low`; a None is derived elsewhere."""
    for name in names:
        value = getattr(job, name)
        if value is not None and not (isfinite(value) and value >= low):
            raise refuse(job, table, name, f"at least {low:g}")


def above_zero(job: Any, table: str, *names: str, most: float = float("inf")) -> None:
    for name in names:
        value = getattr(job, name)
        if value is not None and not (isfinite(value) and 0 < value <= most):
            raise refuse(job, table, name, "above 0" if most > 1 else f"above 0 and at most {most:g}")
