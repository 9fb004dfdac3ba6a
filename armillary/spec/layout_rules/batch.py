"""Layout rules of a step: tokens of a sequence over ranks, sequences in micro-batches and rounds.

As in `rules`, each rule is a test and a sentence that ends with a change after which the test holds.
"""

from __future__ import annotations

from dataclasses import replace

from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case


def tokens_hold(layout: Layout, case: Case) -> bool:
    if case.sequence is None or not case.for_training or layout.tp == 1 or not layout.sequence_parallel:
        return True
    return case.sequence % (layout.cp * layout.tp) == 0


def tokens_say(layout: Layout, case: Case) -> str:
    axes = layout.text("cp", "tp")
    return f"{axes} does not divide a sequence of {case.sequence}; try --set layout.sequence_parallel=false"


def _unit(layout: Layout, case: Case) -> int:
    """Tokens that must divide the batch; the interleaved schedule runs micro-batches in groups of pp."""
    assert case.sequence is not None
    rounds = layout.pp if layout.schedule == "interleaved" else 1
    return case.sequence * layout.micro_batch * layout.dp * rounds


def batch_holds(layout: Layout, case: Case) -> bool:
    if case.sequence is None or case.batch_tokens is None or not case.for_training:
        return True
    return case.batch_tokens >= 1 and case.batch_tokens % _unit(layout, case) == 0


def batch_says(layout: Layout, case: Case) -> str:
    assert case.batch_tokens is not None
    unit = _unit(layout, case)
    smaller = [n for n in range(layout.micro_batch - 1, 0, -1) if batch_holds(replace(layout, micro_batch=n), case)]
    below = case.batch_tokens - case.batch_tokens % unit
    hint = f"layout.micro_batch={smaller[0]}" if smaller else f"train.batch_tokens={below or unit}"
    pp = f" × pp={layout.pp}" if layout.schedule == "interleaved" and layout.pp > 1 else ""
    return (
        f"a batch of {case.batch_tokens} tokens is not a multiple of sequence={case.sequence} × "
        f"micro_batch={layout.micro_batch} × dp={layout.dp}{pp}; try --set {hint}"
    )


def rounds_hold(layout: Layout, case: Case) -> bool:
    """Schedules over several chunks run micro-batches in equal rounds of about as many as there are stages."""
    if not case.by_trainer or layout.pp == 1 or layout.schedule in ("gpipe", "1f1b"):
        return True
    if case.sequence is None or case.batch_tokens is None:
        return True
    count = layout.num_micro_batches(case.batch_tokens, case.sequence)
    return count < 1 or count % max(1, count // layout.pp) == 0


def rounds_say(layout: Layout, case: Case) -> str:
    assert case.sequence is not None and case.batch_tokens is not None
    count, unit = layout.num_micro_batches(case.batch_tokens, case.sequence), _unit(replace(layout, pp=1), case)
    fitting = next(n for n in range(count - 1, 0, -1) if rounds_hold(layout, replace(case, batch_tokens=n * unit)))
    return (
        f"schedule={layout.schedule} runs {count} micro-batches in rounds of about pp={layout.pp}, which do not "
        f"divide them evenly; try --set train.batch_tokens={fitting * unit}"
    )
