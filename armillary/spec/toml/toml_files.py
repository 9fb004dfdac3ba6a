"""TOML files: a long catalogue as rows that are parsed on access, and a writer for recipes.

A verb that needs one model parses one model: splitting at the headings takes a millisecond, parsing the full catalogue
a hundred. The writer is hand-written because `spec` uses only the standard library, which reads TOML (tomllib) but does
not write it.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_HEADING = re.compile(r"^\[([^\[\]\n]+)\][ \t]*$", re.MULTILINE)
_NAME = re.compile(r'"([^"]*)"|([^."]+)')


class Rows(Mapping[str, Row]):
    """Tables of one file by name, in the file's order."""

    def __init__(self, group: str, texts: dict[str, str]) -> None:
        self._group, self._texts, self._parsed = group, texts, dict[str, Row]()

    def __getitem__(self, name: str) -> Row:
        if name not in self._parsed:
            row = tomllib.loads(self._texts[name])
            for key in filter(None, (self._group, name)):
                row = row[key]
            self._parsed[name] = row
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, name: str) -> str | None:
        """The key that `name` means: itself, or the row that lists it among its aliases."""
        wanted = name.strip().lower()
        if wanted in self._texts:
            return wanted
        quoted = f'"{wanted}"'  # only rows that mention it are parsed
        holding = (key for key, text in self._texts.items() if quoted in text)
        return next((key for key in holding if wanted in self[key].get("aliases", ())), None)


def read_rows(path: Path, *, grouped: bool = False) -> dict[str, Rows]:
    """Rows by group: [chip.h100] is row h100 of group chip where headings are grouped, else all are of group ''.
    A heading below a row ([chip.h100.more]) belongs to it; a group without rows is its own row ''."""
    text = path.read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    groups: dict[str, dict[str, str]] = {}
    for heading, end in zip(headings, ends, strict=True):
        names = [quoted or plain for quoted, plain in _NAME.findall(heading.group(1))]
        group, name = (names[0], names[1] if len(names) > 1 else "") if grouped else ("", names[0])
        texts = groups.setdefault(group, {})
        texts[name] = texts.get(name, "") + text[heading.start() : end]
    return {group: Rows(group, texts) for group, texts in groups.items()}


# --- writing


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
