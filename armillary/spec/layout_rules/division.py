"""Layout rules of division: what tp, cp, dp and micro-batches must divide.

tp divides the heads and the MLPs of every kind of layer, in training and in serving (vocabulary rows are padded and
hidden is never sharded, so neither is checked); ranks divide the tokens of a sequence, and micro-batches the batch. As
in `rules`, each rule is a test and a sentence that ends with a change after which the test holds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case


def _sharded_by_tp(layout: Layout, case: Case) -> Iterator[tuple[int, str]]:
    """(size, name) of everything that tp shards."""
    model = case.model
    kinds = {kind.mlp for kind in model.layers}
    replicated = not case.for_training and layout.tp % model.kv_heads == 0
    if model.mla is None and not replicated:
        yield model.kv_heads, f"{model.kv_heads} KV heads"
    yield model.heads, f"{model.heads} heads"
    if model.num_recurrent_layers and model.gated_delta is not None:
        yield model.gated_delta.key_heads, f"the {model.gated_delta.key_heads} key heads of the gated delta-net layers"
    if "dense" in kinds:
        yield model.ffn, f"the ffn of {model.ffn}" + " in the dense layers" * ("moe" in kinds)
    if model.moe and "moe" in kinds and layout.expert_tp > 1:
        yield model.moe.ffn, f"the expert ffn of {model.moe.ffn}"
    if model.moe and "moe" in kinds and model.moe.shared_ffn:
        yield model.moe.shared_ffn, f"the shared-expert ffn of {model.moe.shared_ffn}"


def tp_holds(layout: Layout, case: Case) -> bool:
    return all(size % layout.tp == 0 for size, _ in _sharded_by_tp(layout, case))


def tp_says(layout: Layout, case: Case, setting: str = "--set layout.tp=") -> str:
    """What tp does not divide and the nearest sizes that do, in the form of `setting`."""
    what = next(name for size, name in _sharded_by_tp(layout, case) if size % layout.tp)
    fitting = [tp for tp in range(1, case.model.heads + 1) if tp_holds(replace(layout, tp=tp), case)]
    return f"tp={layout.tp} does not divide {what} of {case.model.name}; try {setting}{near(layout.tp, fitting)}"


def near(value: int, options: Iterable[int]) -> str:
    """The options next to `value` on both sides: '2 or 4'."""
    fitting = sorted(set(options))
    below = [option for option in fitting if option < value][-1:]
    above = [option for option in fitting if option > value][:1]
    return " or ".join(map(str, below + above))


def tokens_hold(layout: Layout, case: Case) -> bool:
    if case.sequence is None or not case.for_training or layout.tp == 1 or not layout.sequence_parallel:
        return True
    return case.sequence % (layout.cp * layout.tp) == 0


def tokens_say(layout: Layout, case: Case) -> str:
    return (
        f"{layout.text('cp', 'tp')} does not divide a sequence of {case.sequence}; "
        "try --set layout.sequence_parallel=false"
    )


def _unit(layout: Layout, case: Case) -> int:
    """Tokens that must divide the batch; the interleaved schedule runs micro-batches in groups of pp."""
    assert case.sequence is not None
    rounds = layout.pp if layout.schedule == "interleaved" else 1
    return case.sequence * layout.micro_batch * layout.dp * rounds


def batch_holds(layout: Layout, case: Case) -> bool:
    if case.sequence is None or case.batch_tokens is None or not case.for_training:
        return True
    if layout.uneven and layout.pp == 1 and not case.model.num_moe_layers:
        return case.batch_tokens % case.sequence == 0 and case.batch_tokens // case.sequence >= layout.dp
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
