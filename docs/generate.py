"""Writes docs/recipes.md and docs/gauges.md from the dataclasses and the gauge vocabulary.

Run it after changing a field or a gauge (`make docs`); a test holds the committed pages to it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from armillary.spec.gauges import GAUGES, prometheus_name
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import TABLES, Recipe
from armillary.spec.tables.hardware import TierTable
from armillary.spec.tables.key_class import MEANING, classes_of
from armillary.spec.tables.model import NESTED, PATTERN_HELP, override_hints
from armillary.spec.toml.fields import help_of

HERE = Path(__file__).parent
Row = tuple[str, ...]
PLAIN: Row = ("key", "type", "default", "meaning")

RECIPES_HEAD = """# Recipes

One TOML file goes through every verb. Every table and every key may be left out, but for the model's name or path;
`--set table.key=value` overrides the file. An unknown table or key is refused with the nearest real name.

```toml
[model]
name = "armillary-25m"            # or path = "…/hf-folder"; any field of the shape can be overridden below it

[hardware]
on = "here"                       # or "h100x64", "dgx-h200x8", or chip = … with tiers = […]

[layout]
dp = 2

[train]
sequence = 512
batch_tokens = 32_768
steps = 200
```

Numbers may be written with underscores, and in `--set` with k, M, G, GB or GiB; `none` stands for "derive it".
This page is made by `make docs` from the dataclasses in `armillary/spec`.

A run is resumed with the recipe as it is at that moment. What an edited key means for it is said of each table, or of
each key where they differ, under *resume*:

"""

GAUGES_HEAD = """# Gauges

One vocabulary for what a plan predicts, a run measures and a diagnosis reads: keys of `gauges.jsonl` and of `predicted`
in `plan.json`; the Prometheus name is `armillary_` and the gauge's name. The end of a name is its unit: `_s` seconds,
`_bytes` bytes, `_usd` dollars, `_fraction` a share from 0 to 1, `_per_s` a rate, `_total` a counter.

This page is made by `make docs` from `armillary/spec/gauges.py`.
"""
LOOPS = {
    "inner": "Inner loop: one device",
    "training": "Training loop: many devices",
    "product": "Product loop: serving",
}


def main() -> None:
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")


def pages() -> dict[str, str]:
    """File name -> its text."""
    return {"recipes.md": recipes_page(), "gauges.md": gauges_page()}


def recipes_page() -> str:
    classes = [f"- *{name}*: {meaning}" for name, meaning in MEANING.items()]
    parts = [RECIPES_HEAD + "\n".join(classes) + "\n"]
    for name, cls in TABLES.items():
        parts.append(f"## [{name}]\n\n{cls.__doc__}{_resume(name)}\n\n{_keys(name, cls)}")
        parts += {"model": _model_parts, "hardware": _hardware_parts}.get(name, list)()
    return "\n".join(parts)


def _resume(table: str) -> str:
    """The class of a whole table, where it has one."""
    of = classes_of(Recipe)[table]
    return f" Edited before a run is resumed: *{of}*." if of else ""


def _keys(table: str, cls: type[Any]) -> str:
    """Its keys, with the class of each where the table has none."""
    if classes_of(Recipe)[table]:
        return _table(_rows(cls))
    classes = classes_of(cls)
    rows = [(*row[:-1], str(classes[row[0]]), row[-1]) for row in _rows(cls)]
    return _table(rows, ("key", "type", "default", "resume", "meaning"))


def _model_parts() -> list[str]:
    """What may stand in [model] beside name and path."""
    keys = [key for key in override_hints() if key not in PATTERN_HELP]
    shape = [row for row in _rows(ModelConfig) if row[0] in keys]
    pattern: list[Row] = [(key, _type(hint), "", words) for key, (hint, words) in PATTERN_HELP.items()]
    parts = ["### Layers\n\n" + _table(pattern), "### The shape\n\nDefaults are the model's own.\n\n" + _table(shape)]
    for key, cls in NESTED.items():
        parts.append(f"### [model.{key}]\n\n{cls.__doc__}\n\n{_table(_rows(cls))}")
    return parts


def _hardware_parts() -> list[str]:
    return [f"### One of hardware.tiers\n\n{TierTable.__doc__}\n\n{_table(_rows(TierTable))}"]


def gauges_page() -> str:
    parts = [GAUGES_HEAD]
    for loop, title in LOOPS.items():
        rows = [(g.name, g.unit, str(g.kind), g.meaning) for g in GAUGES.values() if g.loop == loop]
        parts.append(f"## {title}\n\n{_table(rows, ('gauge', 'unit', 'kind', 'meaning'))}")
    parts.append(f"Prometheus: `ttft_s` is exported as `{prometheus_name('ttft_s')}`.\n")
    return "\n".join(parts)


def _table(rows: Sequence[Row], head: Row = PLAIN) -> str:
    lines = [head, ("---",) * len(head), *[(f"`{name}`", *(_cell(text) for text in rest)) for name, *rest in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _rows(cls: type[Any]) -> list[Row]:
    helps, hints = help_of(cls), get_type_hints(cls)
    return [
        (f.name, _type(hints[f.name]), _default(f), " ".join(helps[f.name].split()))
        for f in dataclasses.fields(cls)
        if f.name != "overrides"
    ]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else "none"
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"{field.default:_}" if isinstance(field.default, int) else _text(field.default)


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _type(hint: Any) -> str:
    """A type as a person would say it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in inner)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    if origin is Mapping:
        return f"table of {_type(inner[1])}s"
    if dataclasses.is_dataclass(hint):
        return "table"
    return {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "none"}[hint]


if __name__ == "__main__":
    main()
