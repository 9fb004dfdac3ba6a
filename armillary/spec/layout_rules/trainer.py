"""Combinations that our trainer cannot run, though the layout divides everything.

As in `rules`, each rule is a test and a sentence that ends with a change after which the test holds.
"""

from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case


def kept_holds(layout: Layout, case: Case) -> bool:
    offloaded = layout.offload in ("activations", "both")
    return not (case.by_trainer and layout.recompute == "selective" and offloaded)


def kept_says(layout: Layout, case: Case) -> str:
    return (
        f"offload={layout.offload} does not cover what selective recompute stores; "
        "try --set layout.recompute=full or none"
    )


def splits_backward(layout: Layout) -> bool:
    """Whether input gradients and weight gradients are separate passes (zero-bubble)."""
    return layout.pp > 1 and layout.schedule == "zero_bubble"


def halves_hold(layout: Layout, case: Case) -> bool:
    """A split backward pass follows the graph of eager operators."""
    return not (case.by_trainer and layout.recompute == "selective" and splits_backward(layout))


def halves_say(layout: Layout, case: Case) -> str:
    return "zero-bubble stages cannot recompute selectively; try --set layout.recompute=full or none"


def compiled_holds(layout: Layout, case: Case) -> bool:
    """torch splits a backward pass along the graph of eager operators."""
    return not (case.by_trainer and case.compiled and splits_backward(layout))


def compiled_says(layout: Layout, case: Case) -> str:
    other = _unsplit_schedule(layout)
    return f"zero-bubble stages cannot be compiled; try --set layout.schedule={other} (or train.compile=false)"


def gathered_holds(layout: Layout, case: Case) -> bool:
    """The weight-gradient pass reads weights that ZeRO-3 has freed by then."""
    shares_weights = layout.zero == 3 and layout.dp * layout.cp > 1
    return not (case.by_trainer and shares_weights and splits_backward(layout))


def gathered_says(layout: Layout, case: Case) -> str:
    return (
        "zero-bubble stages need full weights between the two parts of a backward pass, which zero=3 shards; "
        f"try --set layout.zero=2 (or layout.schedule={_unsplit_schedule(layout)})"
    )


def _unsplit_schedule(layout: Layout) -> str:
    """The nearest schedule that does not split the backward pass."""
    return "interleaved" if layout.interleave > 1 else "1f1b"
