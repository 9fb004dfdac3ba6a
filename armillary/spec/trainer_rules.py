"""What our trainer cannot run together, though a layout divides everything: each rule is a test and a sentence.

As in `layout_rules`, the sentence ends with a change after which the test holds.
"""

from __future__ import annotations

from armillary.spec.layout import Layout
from armillary.spec.layout_case import Case


def kept_holds(layout: Layout, case: Case) -> bool:
    away = layout.offload in ("activations", "both")
    return not (case.by_trainer and layout.recompute == "selective" and away)


def kept_says(layout: Layout, case: Case) -> str:
    return (f"offload={layout.offload} cannot reach what selective recompute keeps; "
            "try --set layout.recompute=full or none")  # fmt: skip


def halves_hold(layout: Layout, case: Case) -> bool:
    """A backward pass in two halves goes along the graph of plain operators."""
    split = layout.pp > 1 and layout.schedule == "zero_bubble"
    return not (case.by_trainer and layout.recompute == "selective" and split)


def halves_say(layout: Layout, case: Case) -> str:
    return "zero-bubble stages cannot recompute selectively; try --set layout.recompute=full or none"


def compiled_holds(layout: Layout, case: Case) -> bool:
    """torch splits a backward pass along the graph of eager operators."""
    split = layout.pp > 1 and layout.schedule == "zero_bubble"
    return not (case.by_trainer and case.compiled and split)


def compiled_says(layout: Layout, case: Case) -> str:
    other = "interleaved" if layout.interleave > 1 else "1f1b"
    return f"zero-bubble stages cannot be compiled; try --set layout.schedule={other} (or train.compile=false)"
