"""The --arguments of a shell script, with its own variables filled in."""

from __future__ import annotations

import re
import shlex
from typing import Any

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(\"[^\"]*\"|'[^']*'|[^\s;#]*)", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")


def arguments(text: str) -> dict[str, Any]:
    """--name value of a script, with its own variables filled in; a flag without a value is True."""
    text = "\n".join(_lines(text))
    variables: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):
        variables[name] = _filled(value.strip("\"'"), variables)
    is_script = bool(variables) or "=(" in text  # else a value may be on the line after its flag
    flags: dict[str, Any] = {}
    name = ""
    for line in _filled(text, variables).splitlines():
        name = "" if is_script else name
        for token in _tokens(line):
            if token.startswith("--") and len(token) > 2:
                name, _, value = token[2:].partition("=")
                name = name.replace("_", "-")
                flags[name] = _typed(value) if value else True
            elif name:
                flags[name] = _typed(token) if flags[name] is True else flags[name]
                name = ""
    return flags


def _lines(text: str) -> list[str]:
    """Lines without comments, continued ones as one: the end of a comment is never a continuation."""
    lines, begun = [], ""
    for line in text.splitlines():
        line = _without_comment(line).rstrip()
        begun += line.removesuffix("\\") + " "
        if not line.endswith("\\"):
            lines.append(begun.rstrip())
            begun = ""
    return [*lines, begun] if begun else lines


def _without_comment(line: str) -> str:
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _filled(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or "")

    return _VARIABLE.sub(value, text)


def _tokens(line: str) -> list[str]:
    """Words of a line; an array's elements may be words in quotes, with a value in each."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote over several lines
        words = line.replace('"', " ").replace("'", " ").split()
    return [word for part in words for word in part.replace("(", " ").replace(")", " ").split()]


def _typed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
