"""Tensor-parallel rules: tp must divide the heads and the MLPs of every kind of layer, in training and in serving.

Vocabulary rows are padded and hidden is never sharded, so neither is checked.
"""

from __future__ import annotations

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
