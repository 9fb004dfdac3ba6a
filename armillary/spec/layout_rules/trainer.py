"""What our trainer cannot run together, though a layout divides everything: each rule is a test and a sentence.

As in `layout_rules`, the sentence ends with a change after which the test holds.
"""

from __future__ import annotations

from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case


def kept_holds(layout: Layout, case: Case) -> bool:
    away = layout.offload in ("activations", "both")
    return not (case.by_trainer and layout.recompute == "selective" and away)


def kept_says(layout: Layout, case: Case) -> str:
    return (
        f"offload={layout.offload} cannot reach what selective recompute keeps; try --set layout.recompute=full or none"
    )


def splits_backward(layout: Layout) -> bool:
    """Whether gradients of inputs and of weights come in passes of their own (zero-bubble)."""
    return layout.pp > 1 and layout.schedule == "zero_bubble"


def halves_hold(layout: Layout, case: Case) -> bool:
    """A backward pass in two halves goes along the graph of plain operators."""
    return not (case.by_trainer and layout.recompute == "selective" and splits_backward(layout))


def halves_say(layout: Layout, case: Case) -> str:
    return "zero-bubble stages cannot recompute selectively; try --set layout.recompute=full or none"


def compiled_holds(layout: Layout, case: Case) -> bool:
    """torch splits a backward pass along the graph of eager operators."""
    return not (case.by_trainer and case.compiled and splits_backward(layout))


def compiled_says(layout: Layout, case: Case) -> str:
    other = _whole_backward(layout)
    return f"zero-bubble stages cannot be compiled; try --set layout.schedule={other} (or train.compile=false)"


def gathered_holds(layout: Layout, case: Case) -> bool:
    """The second half of a backward pass looks up weights that ZeRO-3 has let go of by then."""
    shares_weights = layout.zero == 3 and layout.dp * layout.cp > 1
    return not (case.by_trainer and shares_weights and splits_backward(layout))


def gathered_says(layout: Layout, case: Case) -> str:
    return (
        "zero-bubble stages need whole weights between the halves of a backward pass, which zero=3 shares out; "
        f"try --set layout.zero=2 (or layout.schedule={_whole_backward(layout)})"
    )


def _whole_backward(layout: Layout) -> str:
    """The nearest schedule whose backward passes are whole."""
    return "interleaved" if layout.interleave > 1 else "1f1b"
