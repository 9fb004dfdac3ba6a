"""Forms of the page: fields with labels, what was typed into them, and a message at the field that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Query = Mapping[str, str]
LONGEST_VALUE = 400
"""letters of a value that is read; more is no name or number"""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field; `name` is also its name in the URL, and for recipes the key."""

    name: str
    label: str
    group: str = ""
    default: str = ""
    options: Sequence[str] = ()
    """of a select"""
    suggestions: Sequence[str] = ()
    hint: str = ""
    """shown in an empty field"""
    hidden: bool = False
    wide: bool = False
    """twice as wide as others"""


@dataclass(frozen=True, kw_only=True)
class View:
    """What a tab shows: HTML, messages by field ("" is the form as a whole), and when to look again."""

    html: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)
    refresh_s: float = 0.0


def value_of(query: Query, wanted: Field) -> str:
    """What was typed, or the default; a select has one of its options."""
    text = query.get(wanted.name, wanted.default).strip()[:LONGEST_VALUE]
    return wanted.default if wanted.options and text not in wanted.options else text


def form_html(tab: str, fields: Sequence[Field], query: Query, errors: Mapping[str, str]) -> str:
    """The form; it works without scripts, too, by its button."""
    groups: dict[str, list[Field]] = {}
    for each in fields:
        groups.setdefault(each.group, []).append(each)
    inside = "".join(_group(title, members, query, errors) for title, members in groups.items())
    alert = f"<p class='error' id='form-error' role='alert'>{escape(errors.get('', ''))}</p>"
    return (
        f"<section><form method='get' action='./' id='form'><input type='hidden' name='tab' value='{escape(tab)}'>"
        f"{inside}{alert}<button type='submit' name='show' value='1'>Show</button></form></section>"
    )


def _group(title: str, fields: Sequence[Field], query: Query, errors: Mapping[str, str]) -> str:
    shown = "".join(_field(each, value_of(query, each), errors.get(each.name, "")) for each in fields)
    if all(each.hidden for each in fields):
        return shown
    legend = f"<legend>{escape(title)}</legend>" if title else ""
    return f"<fieldset>{legend}<div class='fields'>{shown}</div></fieldset>"


def _field(wanted: Field, value: str, error: str) -> str:
    name = escape(wanted.name, quote=True)
    if wanted.hidden:
        return f"<input type='hidden' name='{name}' value='{escape(value, quote=True)}'>"
    state = f"id='{name}' name='{name}' aria-describedby='{name}-error'" + (" aria-invalid='true'" if error else "")
    if wanted.options:
        options = "".join(
            f"<option{' selected' if option == value else ''}>{escape(option)}</option>" for option in wanted.options
        )
        control = f"<select {state}>{options}</select>"
    else:
        names = "".join(f"<option value='{escape(text, quote=True)}'>" for text in wanted.suggestions)
        known = f"<datalist id='{name}-names'>{names}</datalist>" if names else ""
        has = f" list='{name}-names'" if names else ""
        control = (
            f"<input {state}{has} value='{escape(value, quote=True)}' placeholder='{escape(wanted.hint, quote=True)}' "
            f"autocomplete='off' spellcheck='false'>{known}"
        )
    kind = "field long" if wanted.wide else "field"
    return (
        f"<div class='{kind}'><label for='{name}'>{escape(wanted.label)}</label>{control}"
        f"<p class='error' id='{name}-error'>{escape(error)}</p></div>"
    )
