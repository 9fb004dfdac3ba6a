"""The nearest valid layout: what an error suggests where its own suggestion would be refused next.

It is found by following the rules' suggestions one after the other, and then reverting every change that was not
needed.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.toml.fields import build, to_plain

Texts = Callable[[Layout, Case], Iterator[str]]
"""texts(layout, case): the messages of all broken rules"""
Changes = dict[str, str]
"""'layout.tp' or 'train.batch_tokens' -> value"""
_MOST = 12
_SINGLE = {key: "1" for key in ("dp", "tp", "pp", "cp", "ep", "interleave", "micro_batch")}
_PLAIN = {f"layout.{key}": value for key, value in (_SINGLE | {"schedule": "1f1b", "shard": "none"}).items()}
"""one device, where following suggestions leads nowhere"""


def completed(text: str, layout: Layout, case: Case, texts: Texts) -> str:
    """The message as it is if its suggestion breaks no other rule; else with the nearest valid layout."""
    if all(_is_clean(change, layout, case, texts) for change in suggested(text)):
        return text
    changes = _nearest(layout, case, texts)
    if changes is None:
        return text
    head, separator, _ = text.rpartition(" try ")
    step = " ".join(f"--set {key}={value}" for key, value in changes.items())
    return f"{head} try {step}" if separator else f"{text}, or try {step}"


def suggested(text: str) -> list[Changes]:
    """Every alternative that a message offers: 'layout.tp=2 or 4' is two."""
    offered = re.findall(r"--set ((?:layout|train)\.\w+)=(\S+)(?: or (\S+))?", text)
    options = [[(key, value) for value in values if value] for key, *values in offered]
    return [dict(choice) for choice in product(*options)]


def _nearest(layout: Layout, case: Case, texts: Texts) -> Changes | None:
    changes = _followed(layout, case, texts)
    if changes is None:
        changes = {key: value for key, value in _PLAIN.items() if str(getattr(layout, key[7:])).lower() != value}
        changes |= _followed(*_applied(changes, layout, case), texts) or {}
    for key in list(changes):
        fewer = {other: value for other, value in changes.items() if other != key}
        changes = fewer if _is_clean(fewer, layout, case, texts) else changes
    return changes if _is_clean(changes, layout, case, texts) else None


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
