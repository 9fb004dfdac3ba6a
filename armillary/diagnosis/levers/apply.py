"""Apply: the recipe of a run with a lever pulled, as a file that trains or serves as it is.

The text that was given is edited where that is enough, so that its comments stay; else the recipe is written anew.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from armillary.diagnosis.evidence.finding import Lever
from armillary.diagnosis.readings.reading import Kind
from armillary.errors import BadInput
from armillary.spec.recipe import Recipe, recipe_from_dict, to_toml
from armillary.store.runs import Run

SERVED = ("serve.", "layout.tp", "layout.precision")
"""keys that `armillary serve` follows: its table of the recipe, and two flags"""


def changed_recipe(run: Run, lever: Lever, kind: Kind = "training") -> str:
    """The recipe of `run` with the lever's change, as TOML."""
    _refuse(lever, kind)
    wanted = recipe_from_dict(run.recipe, overrides_of(lever.change))
    given = run.folder / "recipe.toml"
    if given.is_file():
        text = given.read_text()
        for override in [*run.overrides, *overrides_of(lever.change)]:
            text = with_key(text, *override.split("=", 1))
        if _reads_as(text, wanted, kind):
            return text
    return to_toml(wanted)


def _refuse(lever: Lever, kind: Kind) -> None:
    """A change that no recipe makes would be a file that changes nothing."""
    if not lever.change:
        raise BadInput(f"'{lever.title}' changes no key of the recipe; {lever.action or 'do it by hand'}")
    unread = [key for key in lever.change if kind == "serving" and not key.startswith(SERVED)]
    if unread:
        raise BadInput(
            f"'{lever.title}' changes {', '.join(unread)}, which armillary serve does not read; "
            f"{lever.action or 'do it by hand'}"
        )


def overrides_of(change: Mapping[str, Any]) -> list[str]:
    """As `--set` takes them: 'layout.micro_batch=8'."""
    return [f"{key}={_plain(value)}" for key, value in change.items()]


def with_key(text: str, key: str, value: str) -> str:
    """TOML text with one key of a table set; a comment behind the old value stays."""
    table, _, name = key.partition(".")
    lines, written = text.splitlines(), f"{name} = {_toml(value)}"
    begin = next((i for i, line in enumerate(lines) if re.match(rf"\s*\[{re.escape(table)}\]", line)), None)
    if begin is None:
        return "\n".join([*lines, "", f"[{table}]", written]) + "\n"
    end = next((i for i in range(begin + 1, len(lines)) if re.match(r"\s*\[", lines[i])), len(lines))
    for i in range(begin + 1, end):
        if re.match(rf"\s*{re.escape(name)}\s*=", lines[i]):
            behind = re.search(r"(\s+#[^\"']*)$", lines[i])
            lines[i] = written + (behind.group(1) if behind else "")
            return "\n".join(lines) + "\n"
    while end > begin + 1 and not lines[end - 1].strip():
        end -= 1
    return "\n".join([*lines[:end], written, *lines[end:]]) + "\n"


def _reads_as(text: str, wanted: Recipe, kind: Kind) -> bool:
    """Whether the edited text is the recipe that is wanted; a key written in another way is not found by editing. Of a
    server, model and layout are said on the command line, and nothing is trained."""
    try:
        made = recipe_from_dict(tomllib.loads(text))
    except (BadInput, tomllib.TOMLDecodeError):
        return False
    if kind == "serving":
        made = replace(made, model=wanted.model, layout=wanted.layout, train=wanted.train, data=wanted.data)
    return made == wanted


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: str) -> str:
    """A value as `--set` takes it, as TOML: numbers and booleans bare, the rest quoted."""
    if value in ("true", "false") or re.fullmatch(r"[-+]?\d[\d_]*(\.\d+)?([eE][-+]?\d+)?", value):
        return value
    return json.dumps(value)
