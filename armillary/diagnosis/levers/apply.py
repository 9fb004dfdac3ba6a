"""A lever applied: the recipe of a run with the lever's change, as a file that trains or serves as it is.

The user's text is edited where that is enough, so that its comments stay; otherwise the recipe is written anew.
"""

import tomllib
from dataclasses import replace
from typing import Any

from armillary.diagnosis.evidence.finding import Lever, overrides_of
from armillary.diagnosis.readings.reading import ReadingKind
from armillary.errors import BadInput
from armillary.spec.recipe import Recipe, recipe_from_dict, to_toml
from armillary.store.runs import Run

SERVED = ("serve.", "layout.tp", "layout.precision")
"""keys that `armillary serve` reads: its table of the recipe, and two flags"""


def changed_recipe(run: Run, lever: Lever, kind: ReadingKind = "training") -> str:
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


def _refuse(lever: Lever, kind: ReadingKind) -> None:
    """Refuse a lever that no key of the recipe pulls: its file would change nothing."""
    if not lever.change:
        raise BadInput(f"'{lever.title}' changes no key of the recipe; {lever.action or 'do it by hand'}")
    unread = [key for key in lever.change if kind == "serving" and not key.startswith(SERVED)]
    if unread:
        raise BadInput(
            f"'{lever.title}' changes {', '.join(unread)}, which armillary serve does not read; "
            f"{lever.action or 'do it by hand'}"
        )


def with_key(text: str, key: str, value: str) -> str:
    """TOML text with one key of a table set; comments and order stay. `value` is as `--set` takes it."""
    import tomlkit
    from tomlkit.exceptions import ParseError

    document = tomlkit.parse(text)
    table, _, name = key.partition(".")
    try:
        item: Any = tomlkit.value(value)
    except ParseError:  # a bare word
        item = value
    document.setdefault(table, tomlkit.table())[name] = item
    return tomlkit.dumps(document)


def _reads_as(text: str, wanted: Recipe, kind: ReadingKind) -> bool:
    """Whether the edited text is the wanted recipe. Of a server, model and layout come from the command line, and
    nothing is trained."""
    try:
        edited = recipe_from_dict(tomllib.loads(text))
    except (BadInput, tomllib.TOMLDecodeError):
        return False
    if kind == "serving":
        edited = replace(edited, model=wanted.model, layout=wanted.layout, train=wanted.train, data=wanted.data)
    return edited == wanted
