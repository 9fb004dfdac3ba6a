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
    fields: Callable[[Query, Home], Sequence[Field]]
    view: Callable[[Query, Home], View]
    below: str = ""
    """HTML under the result that stays as it is"""


CHAT = """<section id='chat' hidden><h2>Chat</h2><div id='talk' role='log' aria-label='Conversation' tabindex='0'></div>
<form id='ask'><label for='say'>Message</label><textarea id='say' rows='2' required></textarea>
<div class='fields'><div class='field'><label for='key'>API key, if it needs one</label>
<input id='key' type='password' autocomplete='off'></div></div>
<button>Send</button></form></section>
<script src='chat.js' defer></script>"""
"""shown by its script"""


def page_html(tabs: Mapping[str, Tab], name: str, query: Query, view: View | None, home: Home, csrf: str = "") -> str:
    """The page with its result; with None the script asks for that, so that the first view waits for nothing."""
    tab = tabs[name]
    state = " data-load" if view is None else f" data-refresh='{view.refresh_s:g}'" if view.refresh_s else ""
    view = view or View()
    parts = [
        "<link rel='stylesheet' href='web.css'>",
        "<a class='skip' href='#result'>Skip to the result</a>",
        f"<header data-csrf='{escape(csrf, quote=True)}'><h1>Armillary</h1>"
        f"<nav aria-label='Tabs'>{_links(tabs, name)}</nav></header>",
        form_html(name, tab.fields(query, home), query, view.errors),
        "<p id='status' role='status' class='unseen'></p>",
        f"<div id='result' tabindex='-1'{state}>{view.html}</div>",
        tab.below,
        "<script src='web.js' defer></script>",
    ]
    return document(f"Armillary: {tab.title}", parts)


def _links(tabs: Mapping[str, Tab], current: str) -> str:
    return "".join(
        f"<a href='?tab={escape(name)}'{' aria-current=page' if name == current else ''}>{escape(tab.title)}</a>"
        for name, tab in tabs.items()
    )
