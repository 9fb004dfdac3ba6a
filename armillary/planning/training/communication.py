"""Communication: what a step sends along each axis, and how much of it nothing hides.

Each exchange has a window: the computation beside which it may run. The longer of the two counts, so what is exposed is
the excess of the exchange; hidden exchanges still take multiprocessors from the computation (contention).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.layout_arrays import Array, Ints, Layouts
from armillary.planning.training.compute import Work
from armillary.planning.training.fp8_fp4 import NARROW
from armillary.planning.training.parameters_per_device import Held
from armillary.planning.training.train_case import TrainCase

CONTENTION = 0.08
"""share of the chip that a hidden exchange keeps from the computation beside it (NCCL: 8 to 16 of 132 SMs; Calculon's
tables take 15 % for NVLink and 2 % for InfiniBand)"""
WIRE = 2.0
"""bytes of an activation on the wire"""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One kind of exchange of a step: how long, and how much of that shows."""

    total: Array
    """seconds a step"""
    exposed: Array
    """of them, with nothing beside"""

    @property
    def hidden(self) -> Array:
        return np.maximum(self.total - self.exposed, 0.0)


@dataclass(frozen=True, kw_only=True)
class LayerExchanges:
    """Exchanges of one layer for one micro-batch, forward and backward together."""

    tp: Exchange
    """tensor parallel: gather before and scatter after each cut part"""
    cp: Exchange
    """context parallel: keys and values around the ring"""
    ep: Exchange
    """expert parallel: rows to their experts and back"""

    @property
    def exposed(self) -> Array:
        return self.tp.exposed + self.cp.exposed + self.ep.exposed

    @property
    def total(self) -> Array:
        return self.tp.total + self.cp.total + self.ep.total


def layer_exchanges(case: TrainCase, layouts: Layouts, work: Work, *, moe: bool) -> LayerExchanges:
    """What one layer sends for one micro-batch."""
    tensor, context = _tensor(case, layouts, work, moe=moe), _context(case, layouts, work)
    wall = work.forward + work.backward + tensor.exposed + context.exposed
    return LayerExchanges(tp=tensor, cp=context, ep=_expert(case, layouts, wall, moe=moe))


def _tokens(case: TrainCase, layouts: Layouts) -> Array:
    """Tokens of a micro-batch on one context-parallel rank."""
    return layouts.micro_batch * case.sequence / layouts.cp


def _tensor(case: TrainCase, layouts: Layouts, work: Work, *, moe: bool) -> Exchange:
    """Two cut parts a layer, each gathered and scattered, forward and backward: 8 ring passes of tokens·hidden, and two
    gathers more for dW that dX hides. Uncut experts need none."""
    model = case.model
    stride: Ints = np.ones(len(layouts), dtype=np.int64)
    size = _tokens(case, layouts) * model.hidden * WIRE
    one = case.network.ring_s("all_gather", size, layouts.tp, stride) * case.software.communication
    shared = model.moe is not None and model.moe.shared_ffn > 0
    parts = np.where(moe & (layouts.expert_tp == 1), 1.0 + shared, 2.0)
    parts = np.where(model.parallel != "none", 1.0, parts)
    needed, again = 4 * parts * one, parts * one
    if case.software.tp_overlap:  # in tp pieces: the first shows, the others run beside the product
        shows = needed / np.maximum(layouts.tp, 1) + np.maximum(0.0, needed * (1 - 1 / layouts.tp) - work.tp_products)
    else:
        shows = needed
    return Exchange(total=needed + again, exposed=shows)


def _context(case: TrainCase, layouts: Layouts, work: Work) -> Exchange:
    """Keys and values visit every rank of the ring (Liu et al., arXiv 2310.01889): (cp−1)/cp of them forward, and with
    their gradients twice that backward, beside the attention of the block before."""
    model = case.model
    width = model.mla.kv_rank + model.mla.rope_dim if model.mla else 2 * model.kv_heads * model.head_dim / layouts.tp
    size = layouts.micro_batch * case.sequence * width * WIRE
    one = case.network.ring_s("all_gather", size, layouts.cp, layouts.tp) * case.software.communication
    total = 3 * one
    window = work.attention_forward + work.attention_backward
    shows = np.maximum(total / np.maximum(layouts.cp, 1), total - window)
    return Exchange(total=total, exposed=shows * (layouts.cp > 1))


def _expert(case: TrainCase, layouts: Layouts, wall: Array, *, moe: bool) -> Exchange:
    """Dispatch and combine, forward and backward: 4 all-to-alls of tokens·top_k·hidden."""
    zero = np.zeros(len(layouts))
    if not moe or case.model.moe is None:
        return Exchange(total=zero, exposed=zero)
    rows = _tokens(case, layouts) / layouts.tp * case.model.moe.top_k
    size = rows * case.model.hidden * WIRE * layouts.expert_tp
    stride = np.where(layouts.expert_tp > 1, layouts.tp, 1)
    copies = case.model.moe.top_k if case.software.flex_dispatch else None
    one = case.network.all_to_all_s(size, layouts.ep, stride, copies) * case.software.communication
    total = 4 * one
    beside = (layouts.interleave > 1) & case.software.ep_overlap
    window = np.where(beside, wall, 0.0)
    return Exchange(total=total, exposed=np.maximum(0.1 * total, total - window))


# --- once a step


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Wall time of one micro-batch on a stage, beside which data-parallel exchanges may run."""

    forward: Array
    """of the forward pass"""
    backward: Array
    """of the backward pass"""


def data_parallel(
    case: TrainCase, layouts: Layouts, mine: Held, windows: Windows, micro_batches: Array
) -> tuple[Exchange, Exchange]:
    """(gradients, weights). Gradients are all-reduced (zero 0) or scattered (1) beside the last backward; from zero 2,
    which keeps no whole ones, beside every backward. Weights are gathered once a step beside the first forward (zero 1
    and 2), or before every use (zero 3), where the backward's window is shared by both."""
    gather, scatter = _gather_s(case, layouts, mine), _scatter_s(case, layouts, mine)
    third, share = layouts.zero == 3, 1 - 1 / np.maximum(mine.layers, 1)  # the first and the last piece have no window
    sent = np.where(layouts.zero > 0, share, 1 - 1 / _buckets(case, layouts, mine))
    overlap = 1.0 if case.software.dp_overlap else 0.0
    ahead = _shows(gather, share, windows.forward * overlap)
    late = np.maximum(0.0, gather - windows.backward * overlap)
    left = np.where(third, np.maximum(windows.backward * overlap - gather, 0.0), windows.backward * overlap)
    grads = _shows(scatter, sent, left)
    rounds = np.where(layouts.zero >= 2, micro_batches, 1.0)
    total = np.select([third, layouts.zero > 0], [2 * gather * micro_batches, gather], 0.0)
    exposed = np.select([third, layouts.zero > 0], [(ahead + late) * micro_batches, ahead], 0.0)
    return Exchange(total=scatter * rounds, exposed=grads * rounds), Exchange(total=total, exposed=exposed)


def _buckets(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """Pieces in which whole gradients are sent, a layer each at most: a small model's all travel in one, at the end."""
    size = mine.total * _trained_share(case, layouts, mine) * case.software.grad_bytes
    pieces: Array = np.clip(np.ceil(size / layouts.bucket_bytes), 1.0, np.maximum(mine.layers, 1.0))
    return pieces


def _shows(seconds: Array, share: Array, window: Array) -> Array:
    """What a window leaves of an exchange cut into pieces, of which one finds nothing beside it."""
    shows: Array = np.maximum(0.0, seconds * share - window) + seconds * (1 - share)
    return shows


def _scatter_s(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """Seconds to reduce all gradients; adapters alone where the rest is frozen."""
    total = _grad_s(case, layouts, mine, "dense") + _grad_s(case, layouts, mine, "experts")
    return total * _trained_share(case, layouts, mine)


def _trained_share(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """Of a device's weights, those that change."""
    share = case.lora.held(layouts.tp) / np.maximum(mine.total * layouts.pp, 1) if case.lora else 1.0
    return np.minimum(share, 1.0) * np.ones(len(layouts))


def _gather_s(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """Seconds to gather all weights once; below zero 3 only those that changed, in 8 bits where they are multiplied
    in them, but by fully_shard."""
    narrow = NARROW[layouts.precision] & (layouts.zero < 3) & (not case.software.fully_shard)
    sizes = np.where(narrow, 1.0, 2.0)
    gather = case.network.flat_s if case.software.flat_gathers else case.network.gather_s
    total = np.zeros(len(layouts))
    for which in ("dense", "experts"):
        members, stride, count = _replicas(layouts, mine, which)
        total = total + gather(count * sizes, _sharers(layouts, members), stride)
    return total * case.software.communication * np.where(layouts.zero < 3, _trained_share(case, layouts, mine), 1.0)


def _sharers(layouts: Layouts, members: Ints) -> Ints:
    """Of the ranks that hold the same weights, those that share one copy out: dp (or its shard groups) × cp."""
    sharers: Ints = np.minimum(np.where(layouts.zero > 0, layouts.shard * layouts.cp, 1), members)
    return sharers


def _grad_s(case: TrainCase, layouts: Layouts, mine: Held, which: str) -> Array:
    """Seconds to reduce the gradients of one class of weights over the ranks that hold the same ones."""
    members, stride, count = _replicas(layouts, mine, which)
    size = count * case.software.grad_bytes
    reduce = case.network.ring_s("all_reduce", size, members, stride)
    flat = case.software.flat_gathers
    scatter = (case.network.flat_s if flat else case.network.gather_s)(size, members, stride)
    inside = _sharers(layouts, members)
    hybrid = (layouts.zero > 0) & (inside < members)  # scattered inside a shard group, then reduced across groups
    scattered = np.where(
        hybrid,
        case.network.ring_s("reduce_scatter", size, inside, stride)
        + case.network.ring_s("all_reduce", size / np.maximum(inside, 1), members // inside, stride * inside),
        scatter,
    )
    seconds: Array = np.where(layouts.zero == 0, reduce, scattered) * case.software.communication
    return seconds


def _replicas(layouts: Layouts, mine: Held, which: str) -> tuple[Ints, Ints, Array]:
    """(ranks that hold the same weights, their distance, weights held)."""
    if which == "dense":
        return layouts.dp * layouts.cp, layouts.tp, mine.dense
    pieces = layouts.ep * layouts.expert_tp
    return np.maximum(layouts.dp * layouts.cp * layouts.tp // pieces, 1), pieces, mine.routed


def pipeline_sends(case: TrainCase, layouts: Layouts, micro_batches: Array, chunk: Array) -> Exchange:
    """Hidden states to the next stage and gradients back: 2 sends a chunk and micro-batch, beside the next chunk where
    the schedule interleaves; the first and last pp − 1 find nothing beside them."""
    size = _tokens(case, layouts) / layouts.stream_tp * case.model.hidden * WIRE
    stride = layouts.tp * layouts.cp * layouts.dp
    one = case.network.send_s(size, stride) * case.software.communication
    times = 2 * layouts.interleave * micro_batches
    total = np.where(layouts.pp > 1, one * times, 0.0)
    overlaps = (layouts.interleave > 1) & case.software.pp_overlap
    shows = np.where(overlaps, np.maximum(0.1 * one, one - chunk) * times, total)
    ends = 2 * (layouts.pp - 1) * one
    return Exchange(total=total, exposed=np.where(layouts.pp > 1, np.minimum(shows + ends, total), 0.0))
