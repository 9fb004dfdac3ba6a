"""Model families of a user: from a Python file of theirs, or from an installed package.

A file has one or more `Family` among its names; a package names such an object in the entry point group
`armillary.families`. docs/models.md shows one from beginning to end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadInput
from armillary.spec.hf.layers import Fields, Raw
from armillary.spec.hf.tensor_names import TensorNames
from armillary.spec.model import ModelConfig
from armillary.spec.python_file import run_python_file

ENTRY_POINTS = "armillary.families"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model_type: how its config.json is read and written, and how its tensors are named."""

    model_type: str
    """as config.json has it; must not be one of ours"""
    read: Callable[[Raw], Fields]
    """config.json -> the fields of ModelConfig that differ from the Llama-like reading of the common keys"""
    tensors: TensorNames | None = None
    """names of its tensors"""
    rules: Callable[[ModelConfig], Iterable[Any]] | None = None
    """instead of `tensors`: `armillary.model.weights.hf_layout.Rule` of every tensor, for what names cannot say"""
    architecture: str = ""
    """name of the model class in a written config.json"""
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    """the keys of config.json beside the common ones; none: it cannot be written"""


_registered: dict[str, Family] = {}
_files: dict[str, None] = {}
_entry_points_loaded = False


def register(family: Family) -> None:
    """From now on, in this process."""
    if not family.tensors and not family.rules:
        raise BadInput(f"family '{family.model_type}' names no tensors; give it tensors=TensorNames(…) or rules")
    _registered[family.model_type] = family


def load_family_file(path: str | Path) -> None:
    """Run a user's file and register its families."""
    file = Path(path).expanduser().absolute()
    families = _families(run_python_file(file).values())
    if not families:
        raise BadInput(f"{path} has no Family; write FAMILY = Family(model_type=…, read=…, tensors=…) in it")
    for family in families:
        register(family)
    _files[str(file)] = None


def loaded_files() -> tuple[str, ...]:
    """What was loaded here, for processes that this one starts."""
    return tuple(_files)


def find_family(model_type: str) -> Family | None:
    """A registered one; packages are asked when it is not known otherwise."""
    if model_type not in _registered:
        _load_entry_points()
    return _registered.get(model_type)


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    from importlib.metadata import entry_points  # it brings the email package, and few models need it

    _entry_points_loaded = True
    for point in entry_points(group=ENTRY_POINTS):
        try:
            value = point.load()
        except Exception as error:
            raise BadInput(f"the model family {point.name} ({point.value}) fails: {error}; mend or remove it") from None
        for family in _families([value]):
            register(family)


def _families(values: Iterable[Any]) -> list[Family]:
    """Those among values, and in their lists."""
    families = []
    for value in values:
        parts = value if isinstance(value, list | tuple) else [value]
        families += [part for part in parts if isinstance(part, Family)]
    return families
