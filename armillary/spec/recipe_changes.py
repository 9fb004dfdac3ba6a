"""Differences between two recipes: each key with its class, its earlier and its present value.

A resumed run compares the recipe it was started with and the present one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armillary.spec.recipe import TABLES, Recipe
from armillary.spec.tables.key_class import KeyClass, classes_of
from armillary.spec.toml.fields import to_plain


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """One key, as `--set` names it, whose value differs; a value left out is its default."""

    key: str
    kind: KeyClass
    before: Any
    now: Any

    @property
    def text(self) -> str:
        """As text: 'train.lr 0.001 → 0.0003'."""
        return f"{self.key} {_shown(self.before)} → {_shown(self.now)}"


def recipe_changes(before: Recipe, now: Recipe) -> list[KeyChange]:
    """Every key in which two recipes differ, in the order of the recipe's tables. Defaults are filled in, so writing
    out a default value is no difference."""
    old, new = flat(before), flat(now)
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [KeyChange(key=key, kind=class_of(key), before=old.get(key), now=new.get(key)) for key in keys]


def class_of(key: str) -> KeyClass:
    """Class of a key as `--set` names it; keys of a nested table have the class of that table."""
    table, _, rest = key.partition(".")
    kind = classes_of(Recipe)[table] or classes_of(TABLES[table])[rest.partition(".")[0]]
    assert kind is not None, f"{key} has no class"
    return kind


def flat(recipe: Recipe) -> dict[str, Any]:
    """Key -> value as `--set` names them, defaults filled in."""
    return {key.replace("model.overrides.", "model."): value for key, value in _walk(to_plain(recipe)).items()}


def _walk(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= _walk(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
