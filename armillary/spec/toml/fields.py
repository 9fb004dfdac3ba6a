"""TOML tables, JSON and `--set a.b=c` as frozen dataclasses, with errors that name the nearest key.

The dataclasses are the schema: their annotations are checked here, and their field docstrings are the help text.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from armillary.errors import BadInput, nearest
from armillary.units import parse_count

T = TypeVar("T")
_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]+)\s*(?:,|$)""")


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """`cls(**values)` with every key known and every value of the annotated type."""
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise BadInput(f"{where} is no table of keys and values; correct it")
    for key in values:
        if key not in hints:
            raise unknown_key(key, hints, where)
    ready = {key: convert(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    missing, fields = dataclasses.MISSING, dataclasses.fields(cls)  # type: ignore[arg-type]
    required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    lacking = [key for key in required if key not in ready]
    if lacking:
        raise BadInput(f"{where} lacks {', '.join(lacking)}; add {lacking[0]} = …")
    return cls(**ready)


def unknown_key(key: str, options: Mapping[str, Any], where: str) -> BadInput:
    guess = nearest(key, options)
    hint = f"did you mean {guess}?" if guess else f"it takes {', '.join(options)}"
    return BadInput(f"unknown key '{key}' in {where}; {hint}")


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type; text from `--set` becomes a number, boolean or list."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, where)
    if origin is Literal:
        return _convert_literal(get_args(hint), value, where)
    if origin is tuple:
        items = _split(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise BadInput(f"{where} wants a list, not {value!r}; write it like [1, 2]")
        return tuple(convert(get_args(hint)[0], item, where) for item in items)
    if origin in (dict, Mapping):
        return _convert_mapping(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return _convert_table(hint, value, where)
    return _convert_scalar(hint, value, where)


def _split(text: str) -> list[str]:
    """Items of '[a, "b"]' or 'a,b'; a quoted one may have commas."""
    text = text.strip()
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    parts = [part.strip() for part in _ITEM.findall(inside)]
    return [part[1:-1] if part[0] == part[-1] and part[0] in "\"'" else part for part in parts if part]


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    options = [option for option in get_args(hint) if option is not type(None)]
    if value is None or (isinstance(value, str) and value.lower() == "none" and len(options) < len(get_args(hint))):
        return None
    errors = []
    for option in options:
        try:
            return convert(option, value, where)
        except BadInput as error:
            errors.append(error)
    raise errors[0]


def _convert_literal(options: tuple[Any, ...], value: Any, where: str) -> Any:
    for option in options:
        if str(option) == str(value):
            return option
    guess = nearest(str(value), map(str, options))
    hint = f"did you mean {guess}?" if guess else "choose"
    raise BadInput(f"{where}={value} is not known; {hint} ({', '.join(map(str, options))})")


def _convert_mapping(hint: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} wants a table, not {value!r}")
    return {str(key): convert(get_args(hint)[1], item, f"{where}.{key}") for key, item in value.items()}


def _convert_table(hint: Any, value: Any, where: str) -> Any:
    if isinstance(value, hint):
        return value
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} wants a table with {', '.join(_hints(hint))}, not {value!r}")
    return build(hint, value, where)


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    try:
        return _CONVERTERS[hint](value)
    except (ValueError, TypeError, OverflowError, BadInput):
        if hint is int and str(value).strip().startswith("-"):
            raise BadInput(f"{where}={value!r} is negative; write a whole number like 8 or 16M") from None
        raise BadInput(f"{where}={value!r} is not {_PLAIN[hint]}") from None


def _to_bool(value: Any) -> bool:
    known = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    return known[value.lower()] if isinstance(value, str) and value.lower() in known else _strict(bool, value)


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError
    return parse_count(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _strict(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError
    return value


_CONVERTERS: dict[Any, Any] = {bool: _to_bool, int: _to_int, float: _to_float, str: lambda v: _strict(str, v)}
_PLAIN = {
    bool: "yes or no; write true or false",
    int: "a whole number; write one like 8 or 16M",
    float: "a number; write one like 0.5",
    str: "text; put it in quotes",
}


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def help_of(cls: type[Any]) -> dict[str, str]:
    """Field name -> the docstring under it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    assert isinstance(tree.body[0], ast.ClassDef)
    texts: dict[str, str] = {}
    for item, after in pairwise(tree.body[0].body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_text:
            texts[item.target.id] = str(ast.literal_eval(after.value))  # type: ignore[attr-defined]
    return texts


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as JSON-ready dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(to_plain(item) for item in value)
    return value
