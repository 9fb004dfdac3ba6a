"""TOML written out: the standard library reads it but does not write it.

Enough for recipes: tables of numbers, booleans, texts and lists, tables inside tables, lists of inline tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def dumps(tables: Mapping[str, Any]) -> str:
    """One [table] after another, a blank line between them; tables inside come as [outer.inner]."""
    blocks = [_lines(tables)] if any(not isinstance(value, Mapping) for value in tables.values()) else []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            blocks += _blocks(_key(name), value)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _blocks(name: str, table: Mapping[str, Any]) -> list[list[str]]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    own = _lines(table)
    found = [[f"[{name}]", *own]] if own or not inner else []
    for key, value in inner.items():
        found += _blocks(f"{name}.{_key(key)}", value)
    return found


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
    """JSON's escapes are TOML's, but for the delete character, which TOML wants escaped too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
