"""TOML writer for recipes: tables of numbers, booleans, texts and lists, nested tables, lists of inline tables.

It is hand-written because `spec` uses only the standard library, which reads TOML (tomllib) but does not write it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any


def dumps(tables: Mapping[str, Any]) -> str:
    """One [table] after another with a blank line between them; nested tables as [outer.inner]."""
    blocks = [_lines(tables)] if any(not isinstance(value, Mapping) for value in tables.values()) else []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            blocks += _blocks(_key(name), value)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _blocks(name: str, table: Mapping[str, Any]) -> list[list[str]]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    own = _lines(table)
    blocks = [[f"[{name}]", *own]] if own or not inner else []
    for key, value in inner.items():
        blocks += _blocks(f"{name}.{_key(key)}", value)
    return blocks


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    assert isinstance(value, list | tuple), f"TOML has no {type(value).__name__}"
    return "[" + ", ".join(_value(item) for item in value) + "]"


def _text(value: str) -> str:
    """TOML has JSON's escapes, and also wants the delete character escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
