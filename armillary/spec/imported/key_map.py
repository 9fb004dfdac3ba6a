"""Keys of another trainer's configuration while they are read: what became of each, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from armillary.errors import BadInput, BadRecipe
from armillary.spec import catalogue
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.units import parse_count

NO_COUNTERPART = "no counterpart"


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """One key of theirs and the keys of ours that it became."""

    theirs: str
    value: Any
    ours: str


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One key of theirs that the recipe does not have, and why."""

    theirs: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A recipe, and how it came from the other configuration."""

    recipe: Recipe
    mapped: tuple[Mapped, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the configuration does not say and the user adds."""

    model: str = ""
    on: str = ""
    sequence: int | None = None

    @property
    def num_devices(self) -> int | None:
        return catalogue.cluster(self.on).num_devices if self.on and self.on != "here" else None


@dataclass(kw_only=True)
class Keys:
    """Their keys, flat, and the tables of the recipe that is made of them."""

    values: Mapping[str, Any]
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of `names` that is set; an older name may stand beside a newer one."""
        return next((self.values[name] for name in names if name in self.values), default)

    def number(self, *names: str, default: Any = None) -> Any:
        """The same as an integer; BadRecipe where it is none."""
        value = self.get(*names, default=default)
        if value is None or isinstance(value, int):
            return value
        try:
            return parse_count(str(value)) if not isinstance(value, float) else int(value)
        except BadInput:
            name = next(name for name in names if name in self.values)
            raise BadRecipe(f"{name} = {value!r} is no number; write the number itself") from None

    def put(self, ours: str, value: Any, *theirs: str) -> None:
        """Set a key of ours; `theirs` are the keys that it came from."""
        table, key = ours.split(".", 1)
        self.tables.setdefault(table, {})[key] = value
        for name in theirs:
            if name in self.values:
                self.mapped.append(Mapped(theirs=name, value=self.values[name], ours=ours))
                self.seen.add(name)

    def same(self, table: Mapping[str, str], convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Keys that mean the same: theirs -> ours."""
        for theirs, ours in table.items():
            if theirs in self.values:
                self.put(ours, convert(self.values[theirs]), theirs)

    def leave_out(self, theirs: str, reason: str) -> None:
        if theirs in self.values:
            self.left_out.append(LeftOut(theirs=theirs, value=self.values[theirs], reason=reason))
            self.seen.add(theirs)

    def finished(self, given: Given, reasons: Mapping[str, str]) -> Imported:
        """The recipe; keys that nobody took are listed with the reason for the longest prefix that has one."""
        for name in self.values:
            if name not in self.seen:
                prefixes = sorted((prefix for prefix in reasons if name.startswith(prefix)), key=len)
                self.leave_out(name, reasons[prefixes[-1]] if prefixes else NO_COUNTERPART)
        if given.on:
            self.put("hardware.on", given.on)
        if given.model:
            self.tables["model"] = {
                "path" if "/" in given.model or given.model.startswith(".") else "name": given.model
            }
        if not self.tables.get("model"):
            raise BadRecipe(
                "the configuration names no model that the catalogue has; add --model NAME or --model FOLDER"
            )
        order = ("model", "hardware", "layout", "data", "train")
        recipe = recipe_from_dict({name: self.tables[name] for name in order if self.tables.get(name)})
        return Imported(
            recipe=recipe, mapped=tuple(self.mapped), left_out=tuple(self.left_out), notes=tuple(self.notes)
        )

    def data_parallel(self, world: int | None, inner: int) -> int | None:
        """dp ranks of `world` devices, `inner` of which share one copy of the model; None where `world` is unknown."""
        if world is None:
            return None
        if world % inner:
            raise BadRecipe(
                f"{world} devices are not a multiple of {inner} per copy of the model; name others with --on"
            )
        return world // inner


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values
