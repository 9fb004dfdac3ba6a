"""Layouts as arrays: many layouts side by side, one array per field, so that one formula prices one or a million.

A single layout is an array of length one. Precisions beyond spec.Layout's (mxfp8, nvfp4) exist for published runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, reduce
from typing import Any, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from armillary.errors import BadInput
from armillary.spec.layout import Layout, Precision, Recompute, Schedule

Array: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
OFFLOADS = ("none", "optimizer", "activations", "both", "nvme")
FP8_SCALINGS = ("token", "tensor", "row")
CODES: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "recompute": RECOMPUTES,
    "schedule": SCHEDULES,
    "offload": OFFLOADS,
    "fp8_scaling": FP8_SCALINGS,
}
"""field -> names that its codes stand for"""
NONE, SELECTIVE, FULL = 0, 1, 2
"""codes of RECOMPUTES"""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Fields of spec.Layout as arrays of equal length; names are codes into the tuples above."""

    dp: Ints
    zero: Ints
    shard: Ints
    """dp ranks that shard one copy"""
    tp: Ints
    sequence_parallel: Bools
    pp: Ints
    interleave: Ints
    schedule: Ints
    cp: Ints
    ep: Ints
    micro_batch: Ints
    uneven: Bools
    recompute: Ints
    recompute_every: Ints
    precision: Ints
    fp8_scaling: Ints
    offload: Ints
    bucket_bytes: Ints

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def num_devices(self) -> Ints:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shard_size(self) -> Ints:
        """dp ranks that shard one copy of what `zero` shards; 1 where nothing is sharded."""
        return np.where(self.zero > 0, self.shard, 1)

    @cached_property
    def expert_tp(self) -> Ints:
        """Shards per expert: tp, or 1 where ep spans the tp ranks too."""
        return np.where((self.dp * self.cp) % self.ep == 0, self.tp, 1)

    @cached_property
    def state_shards(self) -> tuple[Ints, Ints]:
        """Ranks that shard the states of dense parameters, and of routed ones."""
        dense = np.where(self.zero > 0, self.shard * self.cp, 1)
        replicas = np.maximum(self.dp * self.cp * self.tp // (self.ep * self.expert_tp), 1)
        return dense, np.minimum(replicas, dense)

    @property
    def stream_tp(self) -> Ints:
        """Ranks that split the tokens of the residual stream."""
        return np.where(self.sequence_parallel, self.tp, 1)

    def take(self, index: Any) -> Layouts:
        """The layouts at `index` (positions or a mask)."""
        return take_rows(self, index)

    def layout(self, i: int) -> Layout:
        """One of them as a spec.Layout; a precision without a name there becomes fp8."""
        name = PRECISIONS[int(self.precision[i])]
        unsharded = int(self.shard[i]) in (int(self.dp[i]), 1) or int(self.zero[i]) == 0
        values: dict[str, Any] = {key: int(getattr(self, key)[i]) for key in _INTS}
        return Layout(
            **values,
            shard=None if unsharded else int(self.shard[i]),
            sequence_parallel=bool(self.sequence_parallel[i]),
            uneven=bool(self.uneven[i]),
            schedule=SCHEDULES[int(self.schedule[i])],  # type: ignore[arg-type]
            recompute=RECOMPUTES[int(self.recompute[i])],  # type: ignore[arg-type]
            precision=name if name in get_args(Precision) else "fp8",  # type: ignore[arg-type]
            fp8_scaling=FP8_SCALINGS[int(self.fp8_scaling[i])],  # type: ignore[arg-type]
            offload=OFFLOADS[int(self.offload[i])],  # type: ignore[arg-type]
        )


_INTS = ("dp", "zero", "tp", "pp", "interleave", "cp", "ep", "micro_batch", "recompute_every", "bucket_bytes")


Table = TypeVar("Table")


def map_arrays(function: Callable[..., Any], table: Table, *more: Any) -> Table:
    """`function` applied to every array of a dataclass of arrays (of such dataclasses, and of dicts of them)."""
    if isinstance(table, np.ndarray):
        return function(table, *more)  # type: ignore[no-any-return]
    if isinstance(table, dict):
        return {key: map_arrays(function, part, *(other[key] for other in more)) for key, part in table.items()}  # type: ignore[return-value]
    values = {
        name: map_arrays(function, getattr(table, name), *[getattr(part, name) for part in more])
        for name in _field_names(type(table))  # type: ignore[arg-type]
    }
    return type(table)(**values)


@cache
def _field_names(table: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(table))


def take_rows(table: Table, index: Any) -> Table:
    """The layouts at `index` (positions or a mask)."""
    return map_arrays(lambda array: array[index], table)


def scaled(table: Table, factor: Array | float) -> Table:
    """Every array times `factor`."""
    return map_arrays(lambda array: array * factor, table)


def plus(*tables: Table) -> Table:
    """The sum of tables, array by array."""
    return map_arrays(lambda *arrays: reduce(np.add, arrays), *tables)


def as_arrays(layouts: Sequence[Layout], precision: str | None = None) -> Layouts:
    """Layouts as arrays; `precision` overrides theirs with a name of PRECISIONS."""
    if not layouts:
        raise BadInput("no layout to price; give at least one")
    columns: dict[str, Any] = {name: _ints([getattr(layout, name) for layout in layouts]) for name in _INTS}
    return Layouts(
        **columns,
        shard=_ints([layout.shard or layout.dp for layout in layouts]),
        sequence_parallel=np.array([layout.sequence_parallel for layout in layouts]),
        uneven=np.array([layout.uneven for layout in layouts]),
        schedule=_ints([SCHEDULES.index(layout.schedule) for layout in layouts]),
        recompute=_ints([RECOMPUTES.index(layout.recompute) for layout in layouts]),
        precision=_ints([PRECISIONS.index(precision or resolved_precision(layout)) for layout in layouts]),
        fp8_scaling=_ints([FP8_SCALINGS.index(layout.fp8_scaling) for layout in layouts]),
        offload=_ints([OFFLOADS.index(layout.offload) for layout in layouts]),
    )


def resolved_precision(layout: Layout) -> str:
    """`resolve` resolves auto for the device before anything is priced; without a device it stands for bf16."""
    return "bf16" if layout.precision == "auto" else layout.precision


def grid(**columns: npt.ArrayLike) -> Layouts:
    """Layouts from columns that broadcast against each other; other fields have spec.Layout's default."""
    default = as_arrays([Layout()])
    given = {name: np.asarray(column) for name, column in columns.items()}
    shape = np.broadcast_shapes((1,), *(column.shape for column in given.values()))
    filled = {
        field.name: np.broadcast_to(given.get(field.name, getattr(default, field.name)), shape)
        for field in fields(Layouts)
    }
    if "shard" not in given:
        filled["shard"] = filled["dp"]
    return Layouts(**filled)


def concatenate(first: Layouts, second: Layouts) -> Layouts:
    """Both, one after the other."""
    return map_arrays(lambda a, b: np.concatenate([a, b]), first, second)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def distinct(column: Ints) -> tuple[Ints, Ints]:
    """(position of the first of each value, sorted by value; the value's index for each element). Values close together
    are counted rather than sorted; np.unique would import masked arrays."""
    low = int(column.min()) if len(column) else 0
    span = int(column.max()) - low + 1 if len(column) else 0
    if span > SPREAD * len(column):
        return _sorted_apart(column)
    places = column - low
    position: Ints = np.full(span, -1, dtype=np.int64)
    position[places[::-1]] = np.arange(len(column) - 1, -1, -1)  # of equal indices the last one assigned stays
    present = position >= 0
    number = np.cumsum(present) - 1
    first: Ints = position[present]
    back: Ints = number[places]
    return first, back


SPREAD = 4
"""values per element up to which counting them is quicker than sorting"""


def _sorted_apart(column: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(column, kind="stable")
    ordered = column[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    back: Ints = np.empty(len(column), dtype=np.int64)
    back[order] = np.cumsum(new) - 1
    first: Ints = order[new]
    return first, back
