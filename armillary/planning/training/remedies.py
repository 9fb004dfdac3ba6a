"""Remedies: the smallest change with which a layout fits into memory.

One setting is changed at a time, then two; of the changes that fit, the fastest is named. Where no change of layout
helps, a larger number of devices is named.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from armillary.planning.device_model.vectorised_layouts import PRECISIONS, as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.memory_breakdown import fits, memory
from armillary.planning.training.train_case import TrainCase
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.rules import layout_problems
from armillary.units import bytes_text, seconds_text

Change = dict[str, Any]
MOST_DEVICES = 2**17


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of layout with which the model fits."""

    change: Change
    layout: Layout
    memory_bytes: float
    step_s: float

    def text(self) -> str:
        sets = " ".join(f"--set layout.{name}={value}" for name, value in self.change.items())
        return f"{sets} ({bytes_text(self.memory_bytes)}, {seconds_text(self.step_s)} per step)"


def remedy(case: TrainCase, layout: Layout, precision: str | None = None) -> Remedy | None:
    """The smallest change with which `layout` fits its devices; None where no change of one or two settings does."""
    singles = list(_singles(case, layout))
    doubles = [first | second for first, second in combinations(singles, 2) if not set(first) & set(second)]
    return _best(case, layout, singles, precision) or _best(case, layout, doubles, precision)


def _best(case: TrainCase, layout: Layout, changes: list[Change], precision: str | None) -> Remedy | None:
    """The fastest of the changed layouts that are valid and fit."""
    rules = Case(
        model=case.model,
        num_devices=case.cluster.num_devices,
        sequence=case.sequence,
        batch_tokens=case.batch_tokens,
        by_trainer=case.software.fully_shard,
    )
    tried = [(change, replace(layout, **change)) for change in changes]
    valid = [(change, changed) for change, changed in tried if not any(layout_problems(changed, rules))]
    if not valid:
        return None
    unlisted = precision if precision in PRECISIONS[-2:] else None  # spec.Layout has no name for it
    priced = predict(case, as_arrays([changed for _, changed in valid], unlisted))
    fitting = np.nonzero(priced.fits)[0]
    if not len(fitting):
        return None
    i = int(fitting[np.argmin(priced.time.total[fitting])])
    change, changed = valid[i]
    return Remedy(
        change=change, layout=changed, memory_bytes=float(priced.memory.total[i]), step_s=float(priced.time.total[i])
    )


def _singles(case: TrainCase, layout: Layout) -> Iterator[Change]:
    """Changes of one setting, including those that trade dp for another axis."""
    stronger = {"none": ("selective", "full"), "selective": ("full",), "full": ()}[layout.recompute]
    yield from ({"recompute": mode} for mode in stronger)
    yield from ({"zero": stage} for stage in range(layout.zero + 1, 4) if layout.dp > 1)
    smaller = [n for n in range(layout.micro_batch - 1, 0, -1) if layout.micro_batch % n == 0]
    yield from ({"micro_batch": n} for n in smaller)
    for axis in ("tp", "pp", "cp"):
        for times in (2, 4, 8):
            if layout.dp % times == 0:
                yield {axis: getattr(layout, axis) * times, "dp": layout.dp // times}
    if case.model.moe is not None:
        yield from ({"ep": layout.ep * times} for times in (2, 4, 8, 16))
    spare = case.cluster.num_devices // max(layout.num_devices, 1)
    yield from ({"dp": layout.dp * n, "zero": 3} for n in (2, 4, 8, 16, 32, 64) if 1 < n <= spare)
    if layout.offload == "none" and case.cluster.chip.kind == "cpu":  # whose memory is the host's
        yield {"offload": "nvme"}
    elif case.cluster.chip.kind != "cpu":  # the layout rules know which combine with recompute
        places = ("none", "optimizer", "activations", "both", "nvme")
        yield from ({"offload": what} for what in places if what != layout.offload)


def devices_that_fit(case: TrainCase, layout: Layout) -> int | None:
    """Devices, doubled until ZeRO 3 (2 where our pipeline stages cannot) over all of them and full recompute fit; None
    beyond MOST_DEVICES."""
    zero: Literal[2, 3] = 2 if case.software.fully_shard and layout.splits_backward else 3
    devices = max(case.cluster.num_devices, layout.num_devices)
    inner = layout.tp * layout.pp * layout.cp
    while devices <= MOST_DEVICES:
        wide = replace(layout, dp=max(1, devices // inner), zero=zero, recompute="full", micro_batch=1, shard=None)
        bigger = replace(case, cluster=_grown(case.cluster, devices))
        layouts = as_arrays([wide])
        if fits(bigger, layouts, memory(bigger, layouts))[0]:
            return devices
        devices *= 2
    return None


def _grown(cluster: Cluster, devices: int) -> Cluster:
    """The same cluster with more of its outermost tier."""
    if not cluster.tiers:
        return cluster
    times = max(1, devices // cluster.num_devices)
    outer = cluster.tiers[-1]
    return replace(cluster, tiers=(*cluster.tiers[:-1], replace(outer, count=outer.count * times)))


def remedy_text(case: TrainCase, layout: Layout, precision: str | None = None) -> str:
    """One line that ends with what to change."""
    change = remedy(case, layout, precision)
    if change is not None:
        return f"try {change.text()}"
    devices = devices_that_fit(case, layout)
    if devices is not None and devices > case.cluster.num_devices:
        name = re.sub(r"x\d+$", "", case.cluster.name) or case.cluster.chip.name
        return f"no change of layout fits {case.cluster.num_devices} devices; try --on {name}x{devices}"
    return "no change of layout fits; try chips with more memory (armillary hardware) or a smaller model"
