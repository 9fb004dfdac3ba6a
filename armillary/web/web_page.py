"""The page around a tab: tabs, form, result; complete without scripts, which only keep it up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from armillary.report.page import document
from armillary.store.home import Home
from armillary.web.form import Field, Query, View, form_html


@dataclass(frozen=True, kw_only=True)
class Tab:
    """One tab: its form and what it shows."""

    title: str
    fields: Callable[[Query], Sequence[Field]]
    view: Callable[[Query, Home], View]


def page_html(tabs: Mapping[str, Tab], name: str, query: Query, view: View | None) -> str:
    """The page with its result; with None the script asks for that, so that the first view waits for nothing."""
    tab = tabs[name]
    state = " data-load" if view is None else f" data-refresh='{view.refresh_s:g}'" if view.refresh_s else ""
    view = view or View()
    parts = [
        "<link rel='stylesheet' href='web.css'>",
        "<a class='skip' href='#result'>Skip to the result</a>",
        f"<header><h1>Armillary</h1><nav aria-label='Tabs'>{_links(tabs, name)}</nav></header>",
        form_html(name, tab.fields(query), query, view.errors),
        f"<div id='result' aria-live='polite' tabindex='-1'{state}>{view.html}</div>",
        "<script src='web.js' defer></script>",
    ]
    return document(f"Armillary: {tab.title}", parts)


def _links(tabs: Mapping[str, Tab], current: str) -> str:
    return "".join(
        f"<a href='?tab={escape(name)}'{' aria-current=page' if name == current else ''}>{escape(tab.title)}</a>"
        for name, tab in tabs.items()
    )
