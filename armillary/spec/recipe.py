"""Recipe: the TOML file of every verb, and `--set a.b=c` overrides.

Tables are frozen dataclasses; an unknown table or key is refused with the nearest real name. Reading a recipe needs
neither model nor machine: `model_config` and `cluster` resolve those.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from armillary.errors import BadRecipe, NotFound, nearest
from armillary.spec import catalogue
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.faults import Faults
from armillary.spec.tables.fleet import Autoscale, Fleet
from armillary.spec.tables.hardware import HardwareTable
from armillary.spec.tables.launch_target import Launch
from armillary.spec.tables.model import ModelTable, apply_model_overrides, model_table, table_to_plain
from armillary.spec.tables.report import ReportTable
from armillary.spec.tables.resume_class import Defining, Free, KeyClass, Noted, classes_of
from armillary.spec.tables.serve import Predict, Serve
from armillary.spec.tables.traffic import Cost, Load, Objective, Traffic
from armillary.spec.tables.train import Data, TrainJob
from armillary.spec.toml.fields import build, to_plain
from armillary.spec.toml.toml_files import dumps


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is planned, trained or served, where and how. The class of a table (Free, Noted, Defining) says what editing
    it means for a resumed run; [data] and [train] have one per key."""

    model: Defining[ModelTable]
    hardware: Noted[HardwareTable] = field(default_factory=HardwareTable)
    layout: Noted[Layout] = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    train: TrainJob = field(default_factory=TrainJob)
    serve: Free[Serve] = field(default_factory=Serve)
    traffic: Free[Traffic] = field(default_factory=Traffic)
    objective: Free[Objective] = field(default_factory=Objective)
    predict: Free[Predict] = field(default_factory=Predict)
    load: Free[Load] = field(default_factory=Load)
    fleet: Free[Fleet] = field(default_factory=Fleet)
    autoscale: Free[Autoscale] = field(default_factory=Autoscale)
    faults: Free[Faults] = field(default_factory=Faults)
    cost: Free[Cost] = field(default_factory=Cost)
    launch: Free[Launch] = field(default_factory=Launch)
    report: Free[ReportTable] = field(default_factory=ReportTable)

    def model_config(self, base: ModelConfig | None = None) -> ModelConfig:
        """The model's shape with the recipe's overrides: of `base`, or of the named catalogue model."""
        config = base if base is not None else catalogue.model(self.model.source).config
        return apply_model_overrides(config, self.model.overrides)

    def cluster(self, here: Cluster | None = None) -> Cluster:
        """The devices; `here` is this machine as the caller detected it."""
        return self.hardware.cluster(here)


TABLES: Mapping[str, type[Any]] = get_type_hints(Recipe)
SERVICE_TABLE = "gateway"
"""settings of `armillary up`'s gateway, which only that reads"""


# --- reading


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file and apply `a.b=c` overrides over it; a service's is planned and reported like any other."""
    tables = read_tables(Path(path))
    return recipe_from_dict({name: table for name, table in tables.items() if name != SERVICE_TABLE}, overrides)


def load_service_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The same of a service's file, whose [gateway] is left out."""
    tables = {name: table for name, table in read_tables(Path(path)).items() if name != "gateway"}
    return recipe_from_dict(tables, overrides)


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a recipe file, unchecked: a service's has one of the gateway beside a recipe's own."""
    return _parse(_read(path), str(path))


def recipe_from_dict(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from parsed TOML or JSON tables."""
    for name, table in values.items():
        if name not in TABLES:
            raise _unknown_table(name)
        if not isinstance(table, Mapping):
            raise BadRecipe(f"{name} = {table!r} stands alone; write it as a table: [{name}]")
    tables: dict[str, dict[str, Any]] = {name: dict(table) for name, table in values.items()}
    for text in overrides:
        _apply(tables, *parse_set(text))
    parts: dict[str, Any] = {
        name: build(TABLES[name], table, name) for name, table in tables.items() if name != "model"
    }
    return Recipe(model=model_table(tables.get("model", {})), **parts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise _no_file(path) from None
    except UnicodeDecodeError:
        raise BadRecipe(f"{path} is not text in UTF-8; save it as UTF-8") from None
    except IsADirectoryError:
        raise NotFound(f"{path} is a folder; name the recipe file in it") from None
    except OSError as error:
        raise BadRecipe(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def _no_file(path: Path) -> NotFound:
    recipes = {str(file): file for folder in {path.parent, Path("recipes")} for file in folder.glob("*.toml")}
    same = (name for name, file in recipes.items() if file.name == path.name)
    guess = next(same, None) or nearest(str(path), recipes)
    hint = f"did you mean {guess}?" if guess else "give the path of a .toml file"
    return NotFound(f"no recipe '{path}'; {hint}")


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRecipe(_at_line(str(error), text, where)) from None


def _at_line(message: str, text: str, where: str) -> str:
    """tomllib's message with the place in front: 'tour.toml:3: …'."""
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", message)
    line = (place and place.group(1)) or max(1, len(text.splitlines()))
    cause = re.sub(r" \(at .*?\)$", "", message).splitlines()[0]
    return f"{where}:{line}: not valid TOML: {cause[:1].lower()}{cause[1:]}; correct that line"


def _unknown_table(name: str) -> BadRecipe:
    guess = nearest(name, TABLES)
    hint = f"did you mean [{guess}]?" if guess else f"it takes {', '.join(f'[{table}]' for table in TABLES)}"
    return BadRecipe(f"unknown table [{name}]; {hint}")


# --- --set a.b=c


def parse_set(text: str) -> tuple[tuple[str, ...], Any]:
    """'layout.tp=2' -> (('layout', 'tp'), '2'). Values stay text, to be parsed by the type of their field; lists of
    tables are TOML."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or len(path) < 2 or not all(path):
        raise BadRecipe(f"cannot read --set {text!r}; write it like --set layout.tp=2")
    if path[0] not in TABLES:
        raise _unknown_table(path[0])
    value = value.strip()
    return path, _parse(f"value = {value}", f"--set {key}")["value"] if value.startswith(("[{", "{")) else value


_EXCLUSIVE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("model", "name"): ("path",),
    ("model", "path"): ("name",),
    ("hardware", "on"): ("chip", "tiers", "nodes", "network"),
    ("hardware", "chip"): ("on", "nodes", "network"),
    ("hardware", "tiers"): ("on", "nodes", "network"),
    ("data", "source"): ("blend", "paths"),
    ("data", "path"): ("blend", "paths"),
    ("data", "blend"): ("source", "path"),
}


def _apply(tables: dict[str, dict[str, Any]], path: tuple[str, ...], value: Any) -> None:
    """Set one value and remove the keys that it excludes (model.name removes model.path)."""
    table = tables.setdefault(path[0], {})
    for other in _EXCLUSIVE.get(path[:2], ()):
        table.pop(other, None)
    for part in path[1:-1]:
        inner = table.get(part)
        table[part] = dict(inner) if isinstance(inner, Mapping) else {}
        table = table[part]
    table[path[-1]] = value


# --- writing


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Tables with the values that are not the defaults; recipe_from_dict gives the same recipe back."""
    tables = {"model": table_to_plain(recipe.model)}
    for name, cls in TABLES.items():
        if name != "model":
            values, default = to_plain(getattr(recipe, name)), to_plain(cls())
            tables[name] = {key: value for key, value in values.items() if value != default[key]}
    return {name: table for name, table in tables.items() if table}


def to_toml(recipe: Recipe) -> str:
    """The recipe as a file that load_recipe reads back to the same recipe."""
    return dumps(to_dict(recipe))


# --- agreement of tables


def check_recipe(recipe: Recipe, config: ModelConfig, *, for_training: bool = True) -> None:
    """Raise BadRecipe where tables contradict the model: lengths beyond its context, a vocabulary it lacks."""
    if for_training and recipe.train.sequence > config.context:
        raise BadRecipe(
            f"train.sequence={recipe.train.sequence} is longer than the context of {config.name}; "
            f"try --set train.sequence={config.context}"
        )
    if for_training and recipe.data.vocab and recipe.data.vocab > config.vocab:
        raise BadRecipe(
            f"data.vocab={recipe.data.vocab} is more than the {config.vocab} rows of {config.name}; "
            f"try --set data.vocab={config.vocab}"
        )
    longest = recipe.serve.max_model_len
    if not for_training and longest and longest > config.context:
        raise BadRecipe(
            f"serve.max_model_len={longest} is longer than the context of {config.name}; "
            f"try --set serve.max_model_len={config.context}"
        )


# --- differences between two recipes: a resumed run compares the one it was started with and the present one


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
    return {key.replace("model.overrides.", "model."): value for key, value in _flat(to_plain(recipe)).items()}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
