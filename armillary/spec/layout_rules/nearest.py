"""The nearest layout that breaks no rule: what a refusal ends with, where its own suggestion would be refused next.

Found by following the rules' suggestions, one after the other, and then taking back every change that was not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.toml.fields import build, to_plain

Texts = Callable[[Layout, Case], Iterator[str]]
"""texts(layout, case): what every broken rule says"""
Changes = dict[str, str]
"""'layout.tp' or 'train.batch_tokens' -> value"""
_MOST = 12
_SINGLE = {key: "1" for key in ("dp", "tp", "pp", "cp", "ep", "interleave", "micro_batch")}
_PLAIN = {f"layout.{key}": value for key, value in (_SINGLE | {"schedule": "1f1b", "shard": "none"}).items()}
"""one device, where following suggestions leads nowhere"""


def completed(text: str, layout: Layout, case: Case, texts: Texts) -> str:
    """The sentence as it is if what it suggests breaks no other rule; else with the nearest layout that breaks none."""
    if all(_is_clean(change, layout, case, texts) for change in suggested(text)):
        return text
    changes = _nearest(layout, case, texts)
    if changes is None:
        return text
    head, found, _ = text.rpartition(" try ")
    step = " ".join(f"--set {key}={value}" for key, value in changes.items())
    return f"{head} try {step}" if found else f"{text}, or try {step}"


def suggested(text: str) -> list[Changes]:
    """Every alternative that a sentence offers: 'layout.tp=2 or 4' is two."""
    offered = re.findall(r"--set ((?:layout|train)\.\w+)=(\S+)(?: or (\S+))?", text)
    options = [[(key, value) for value in values if value] for key, *values in offered]
    return [dict(choice) for choice in product(*options)]


def _nearest(layout: Layout, case: Case, texts: Texts) -> Changes | None:
    found = _followed(layout, case, texts)
    if found is None:
        found = {key: value for key, value in _PLAIN.items() if _text(getattr(layout, key[7:])) != value}
        found |= _followed(*_applied(found, layout, case), texts) or {}
    for key in list(found):
        fewer = {other: value for other, value in found.items() if other != key}
        found = fewer if _is_clean(fewer, layout, case, texts) else found
    return found if _is_clean(found, layout, case, texts) else None


def _followed(layout: Layout, case: Case, texts: Texts) -> Changes | None:
    changes: Changes = {}
    for _ in range(_MOST):
        text = next(texts(*_applied(changes, layout, case)), None)
        if text is None:
            return changes
        changes |= suggested(text)[0]
    return None


def _is_clean(changes: Changes, layout: Layout, case: Case, texts: Texts) -> bool:
    return next(texts(*_applied(changes, layout, case)), None) is None


def _applied(changes: Changes, layout: Layout, case: Case) -> tuple[Layout, Case]:
    values = {key.removeprefix("layout."): value for key, value in changes.items() if key.startswith("layout.")}
    batch = changes.get("train.batch_tokens")
    changed = case.filled(build(Layout, to_plain(layout) | values, "layout"))
    return changed, replace(case, batch_tokens=int(batch)) if batch else case


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower()
