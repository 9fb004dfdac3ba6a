"""The rules by which a layout divides a model, its devices and its batch, and what to change when it does not.

Each rule is a test and a sentence; the sentence ends with a change after which that test holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from armillary.errors import BadLayout
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.division import (
    batch_holds,
    batch_says,
    near,
    rounds_hold,
    rounds_say,
    tokens_hold,
    tokens_say,
    tp_holds,
    tp_says,
)
from armillary.spec.layout_rules.nearest_valid import completed
from armillary.spec.model import ModelConfig


class Problem(NamedTuple):
    """A broken rule, with a message that ends with what to change."""

    rule: str
    text: str


def check_layout(
    layout: Layout,
    model: ModelConfig,
    *,
    num_devices: int | None = None,
    fills: int | None = None,
    sequence: int | None = None,
    batch_tokens: int | None = None,
    for_training: bool = True,
    by_trainer: bool = False,
    compiled: bool = False,
) -> None:
    """Raise BadLayout, with the nearest valid layout, if the layout does not divide model, devices or batch.
    It may use fewer devices than there are, the rest stays idle; but not fewer than `fills`, where given."""
    case = Case(
        model=model,
        num_devices=num_devices,
        fills=fills,
        sequence=sequence,
        batch_tokens=batch_tokens,
        for_training=for_training,
        by_trainer=by_trainer,
        compiled=compiled,
    )
    if num_devices is not None and num_devices < 1:
        raise BadLayout(f"{num_devices} devices cannot run anything; give at least one, like --on h100x8")
    for text in _texts(layout, case):
        raise BadLayout(completed(text, layout, case, _texts))


def layout_problems(layout: Layout, case: Case) -> Iterator[Problem]:
    """Every rule the layout breaks, the most telling first."""
    for name, (holds, says) in _RULES.items():
        if not holds(layout, case):
            yield Problem(name, says(layout, case))


def _texts(layout: Layout, case: Case) -> Iterator[str]:
    return (problem.text for problem in layout_problems(layout, case))


# --- suggestions


def _first_clean(layout: Layout, case: Case, options: list[dict[str, Any]]) -> str:
    """The first change after which every rule holds, else the first: '--set layout.pp=2'."""

    def clean(change: dict[str, Any]) -> bool:
        changed = case.filled(replace(layout, **change))
        return all(holds(changed, case) for holds, _ in _RULES.values())

    best = next((option for option in options if clean(option)), options[0])
    return " ".join(f"--set layout.{key}={str(value).lower()}" for key, value in best.items())


# --- pp


def _pp_holds(layout: Layout, case: Case) -> bool:
    return layout.pp == 1 or layout.pp * layout.interleave <= case.model.num_layers + 2


def _pp_says(layout: Layout, case: Case) -> str:
    most = case.model.num_layers + 2
    options: list[dict[str, Any]] = []
    options += [{"interleave": v} for v in range(min(layout.interleave - 1, most // layout.pp), 0, -1)]
    options += [{"pp": pp} for pp in range(min(layout.pp - 1, most // layout.interleave), 1, -1)]
    options += [{"pp": most if layout.pp > most else layout.pp, "interleave": 1, "schedule": "1f1b"}, {"pp": 1}]
    return (
        f"{layout.text('pp', 'interleave')} makes more chunks than {case.model.name} has layers, embedding and "
        f"head ({most}); try {_first_clean(layout, case, options)}"
    )


def _schedule_holds(layout: Layout, case: Case) -> bool:
    if layout.pp == 1:
        return layout.interleave == 1
    return layout.schedule == "zero_bubble" or (layout.interleave > 1) == (layout.schedule == "interleaved")


def _schedule_says(layout: Layout, case: Case) -> str:
    if layout.pp == 1:
        return f"interleave={layout.interleave} needs pipeline stages; try --set layout.interleave=1"
    if layout.interleave > 1:
        return (
            f"schedule={layout.schedule} runs one chunk per stage, not interleave={layout.interleave}; "
            "try --set layout.schedule=interleaved"
        )
    return "schedule=interleaved needs at least two chunks per stage; try --set layout.schedule=1f1b"


# --- cp, ep, shard


def _cp_holds(layout: Layout, case: Case) -> bool:
    return layout.cp == 1 or case.sequence is None or case.sequence % (2 * layout.cp) == 0


def _cp_says(layout: Layout, case: Case) -> str:
    assert case.sequence is not None
    most = min(case.sequence // 2, 2 * layout.cp)
    fitting = [cp for cp in range(1, most + 1) if case.sequence % (2 * cp) == 0] or [1]
    return (
        f"cp={layout.cp} does not divide a sequence of {case.sequence} into 2 × {layout.cp} equal chunks (zig-zag); "
        f"try --set layout.cp={near(layout.cp, fitting)}"
    )


def _recurrent_cp_holds(layout: Layout, case: Case) -> bool:
    """A recurrent state would have to pass from rank to rank, in the order of the sequence."""
    return layout.cp == 1 or not case.model.num_recurrent_layers


def _recurrent_cp_says(layout: Layout, case: Case) -> str:
    return (
        f"cp={layout.cp} shards sequences and the gated delta-net layers of {case.model.name} keep a state along "
        "them; try --set layout.cp=1"
    )


def _pairs_cp_holds(layout: Layout, case: Case) -> bool:
    """Ring attention passes on one key and value; pairs need both windows on one rank."""
    return layout.cp == 1 or all(kind.attention != "2-simplicial" for kind in case.model.layers)


def _pairs_cp_says(layout: Layout, case: Case) -> str:
    return (
        f"cp={layout.cp} shards sequences and the 2-simplicial layers of {case.model.name} attend to pairs of tokens, "
        "which the ring does not pass on; try --set layout.cp=1"
    )


def _ep_holds(layout: Layout, case: Case) -> bool:
    if layout.ep == 1:
        return True
    experts = case.model.moe.num_experts if case.model.moe else 0
    return experts > 0 and experts % layout.ep == 0 and _expert_ranks(layout, case) % layout.ep == 0


def _expert_ranks(layout: Layout, case: Case) -> int:
    return layout.dp * layout.cp * (1 if case.by_trainer else layout.tp)


def _ep_says(layout: Layout, case: Case) -> str:
    if case.model.moe is None:
        return f"ep={layout.ep} but {case.model.name} has no experts; try --set layout.ep=1"
    experts, ranks = case.model.moe.num_experts, _expert_ranks(layout, case)
    fitting = [ep for ep in range(1, experts + 1) if _ep_holds(replace(layout, ep=ep), case)]
    nearest = near(layout.ep, fitting)
    if experts % layout.ep:
        return f"ep={layout.ep} does not divide {experts} experts of {case.model.name}; try --set layout.ep={nearest}"
    inner = layout.num_devices // layout.dp
    enough = inner * next(dp for dp in range(1, layout.ep + 1) if dp * (ranks // layout.dp) % layout.ep == 0)
    more = f" (--devices {enough} would do)" if case.for_training and enough > layout.num_devices else ""
    over = "dp × cp" if case.by_trainer else "dp × cp × tp"
    return f"ep={layout.ep} does not divide {over} = {ranks}{more}; try --set layout.ep={nearest}"


def _shard_holds(layout: Layout, case: Case) -> bool:
    return layout.shard is None or (layout.zero > 0 and layout.dp % layout.shard == 0)


def _shard_says(layout: Layout, case: Case) -> str:
    assert layout.shard is not None
    fitting = [size for size in range(1, layout.dp + 1) if layout.dp % size == 0]
    if layout.zero == 0:
        change = "zero=3" if layout.shard in fitting else "shard=none"
        return f"shard={layout.shard} but zero=0 shards nothing; try --set layout.{change}"
    return f"shard={layout.shard} does not divide dp={layout.dp}; try --set layout.shard={near(layout.shard, fitting)}"


# --- devices


def _devices_hold(layout: Layout, case: Case) -> bool:
    return case.num_devices is None or layout.num_devices <= case.num_devices


def _devices_say(layout: Layout, case: Case) -> str:
    available = case.num_devices
    assert available is not None
    options = [change for axis in _SHRINK if (change := _shrunk(layout, case, available, (axis,)))]
    options = options or [_shrunk(layout, case, available, _SHRINK)]
    devices = f"{available} device{'s' * (available != 1)}"
    return f"{devices} cannot hold {layout.text()}: try {_first_clean(layout, case, options)}"


def _fill_holds(layout: Layout, case: Case) -> bool:
    return case.fills is None or layout.num_devices == case.fills


def _fill_says(layout: Layout, case: Case) -> str:
    assert case.fills is not None
    return layout.leaves_over(case.fills)


_SHRINK = ("dp", "pp", "cp", "tp")


def _shrunk(layout: Layout, case: Case, available: int, axes: tuple[str, ...]) -> dict[str, Any]:
    """The least reduction of `axes`, in that order, that fits the `available` devices; empty if none does."""
    change: dict[str, Any] = {}
    for axis in axes:
        small = replace(layout, **change)
        if small.num_devices <= available:
            break
        size = getattr(small, axis)
        if size == 1:
            continue
        most = max(1, min(size, available // (small.num_devices // size)))
        sizes = (n for n in range(most, 0, -1) if n == 1 or _divides(replace(layout, **{**change, axis: n}), case))
        change[axis] = next(sizes)
    return change if replace(layout, **change).num_devices <= available else {}


def _divides(layout: Layout, case: Case) -> bool:
    return all(_RULES[name][0](layout, case) for name in ("tp", "pp", "schedule", "cp"))


# --- combinations that our trainer cannot run, though the layout divides everything


def _selective_offload_holds(layout: Layout, case: Case) -> bool:
    return not (case.by_trainer and layout.recompute == "selective" and layout.offload in ("activations", "both"))


def _selective_offload_says(layout: Layout, case: Case) -> str:
    return (
        f"offload={layout.offload} does not cover what selective recompute stores; "
        "try --set layout.recompute=full or none"
    )


def _selective_split_holds(layout: Layout, case: Case) -> bool:
    """A split backward pass follows the graph of eager operators."""
    return not (case.by_trainer and layout.recompute == "selective" and layout.splits_backward)


def _selective_split_says(layout: Layout, case: Case) -> str:
    return "zero-bubble stages cannot recompute selectively; try --set layout.recompute=full or none"


def _zero3_split_holds(layout: Layout, case: Case) -> bool:
    """The weight-gradient pass reads weights that ZeRO-3 has freed by then."""
    return not (case.by_trainer and layout.zero == 3 and layout.dp * layout.cp > 1 and layout.splits_backward)


def _zero3_split_says(layout: Layout, case: Case) -> str:
    return (
        "zero-bubble stages need full weights between the two parts of a backward pass, which zero=3 shards; "
        f"try --set layout.zero=2 (or layout.schedule={_unsplit_schedule(layout)})"
    )


def _compiled_split_holds(layout: Layout, case: Case) -> bool:
    """torch splits a backward pass along the graph of eager operators."""
    return not (case.by_trainer and case.compiled and layout.splits_backward)


def _compiled_split_says(layout: Layout, case: Case) -> str:
    schedule = _unsplit_schedule(layout)
    return f"zero-bubble stages cannot be compiled; try --set layout.schedule={schedule} (or train.compile=false)"


def _unsplit_schedule(layout: Layout) -> str:
    return "interleaved" if layout.interleave > 1 else "1f1b"


_Rule = tuple[Callable[[Layout, Case], bool], Callable[[Layout, Case], str]]
_RULES: dict[str, _Rule] = {
    "tp": (tp_holds, tp_says),
    "pp": (_pp_holds, _pp_says),
    "schedule": (_schedule_holds, _schedule_says),
    "cp": (_cp_holds, _cp_says),
    "recurrent_cp": (_recurrent_cp_holds, _recurrent_cp_says),
    "pairs_cp": (_pairs_cp_holds, _pairs_cp_says),
    "ep": (_ep_holds, _ep_says),
    "shard": (_shard_holds, _shard_says),
    "selective_offload": (_selective_offload_holds, _selective_offload_says),
    "selective_split": (_selective_split_holds, _selective_split_says),
    "zero3_split": (_zero3_split_holds, _zero3_split_says),
    "compiled_split": (_compiled_split_holds, _compiled_split_says),
    "fill": (_fill_holds, _fill_says),
    "devices": (_devices_hold, _devices_say),
    "tokens": (tokens_hold, tokens_say),
    "batch": (batch_holds, batch_says),
    "rounds": (rounds_hold, rounds_say),
}
