"""Communication time: what a step sends along each parallel axis, and how much of it is exposed.

Each collective has an overlap window: the computation that runs beside it. The longer of the two counts, so the exposed
part is the excess of the collective; hidden communication still takes multiprocessors from compute (contention).
"""

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array, Ints, Layouts
from armillary.planning.training.fp8_fp4 import NARROW
from armillary.planning.training.op_times import Work
from armillary.planning.training.stages import DeviceParameters
from armillary.planning.training.train_case import TrainCase

CONTENTION = 0.08
"""share of the chip that hidden communication takes from the computation beside it (NCCL: 8 to 16 of 132 SMs;
Calculon's tables take 15 % for NVLink and 2 % for InfiniBand)"""
WIRE = 2.0
"""bytes per activation element on the wire"""


@dataclass(frozen=True, kw_only=True)
class CommCost:
    """Seconds of one kind of communication, and those of them that compute does not hide."""

    total: Array
    exposed: Array

    @property
    def hidden(self) -> Array:
        return np.maximum(self.total - self.exposed, 0.0)


@dataclass(frozen=True, kw_only=True)
class LayerComm:
    """Communication of one layer for one micro-batch, forward and backward together."""

    tp: CommCost
    cp: CommCost
    ep: CommCost

    @property
    def exposed(self) -> Array:
        return self.tp.exposed + self.cp.exposed + self.ep.exposed


def layer_comm(case: TrainCase, layouts: Layouts, work: Work, *, moe: bool) -> LayerComm:
    """Communication of one layer for one micro-batch."""
    tensor, context = _tensor(case, layouts, work, moe=moe), _context(case, layouts, work)
    wall = work.forward + work.backward + tensor.exposed + context.exposed
    return LayerComm(tp=tensor, cp=context, ep=_expert(case, layouts, wall, moe=moe))


def _tensor(case: TrainCase, layouts: Layouts, work: Work, *, moe: bool) -> CommCost:
    """Two sharded regions per layer, each with an all-gather and a reduce-scatter, forward and backward: 8 ring passes
    of tokens·hidden, and two more all-gathers for dW that dX hides. Experts that tp does not shard need none."""
    model = case.model
    stride: Ints = np.ones(len(layouts), dtype=np.int64)
    size = case.tokens(layouts) * model.hidden * WIRE
    ring = case.network.ring_s("all_gather", size, layouts.tp, stride) * case.software.communication
    shared = model.moe is not None and model.moe.shared_ffn > 0
    regions = np.where(moe & (layouts.expert_tp == 1), 1.0 + shared, 2.0)
    regions = np.where(model.parallel != "none", 1.0, regions)
    needed, hidden = 4 * regions * ring, regions * ring
    if case.software.tp_overlap:  # in tp chunks: the first is exposed, the others run beside the GEMM
        exposed = needed / np.maximum(layouts.tp, 1) + np.maximum(0.0, needed * (1 - 1 / layouts.tp) - work.tp_gemm)
    else:
        exposed = needed
    return CommCost(total=needed + hidden, exposed=exposed)


def _context(case: TrainCase, layouts: Layouts, work: Work) -> CommCost:
    """Keys and values travel around the ring (Liu et al., arXiv 2310.01889): (cp−1)/cp of them forward, and with their
    gradients twice that backward, beside the attention of the previous block."""
    model = case.model
    width = model.mla.kv_rank + model.mla.rope_dim if model.mla else 2 * model.kv_heads * model.head_dim / layouts.tp
    size = layouts.micro_batch * case.sequence * width * WIRE
    total = 3 * (case.network.ring_s("all_gather", size, layouts.cp, layouts.tp) * case.software.communication)
    window = work.attention_forward + work.attention_backward
    exposed = np.maximum(total / np.maximum(layouts.cp, 1), total - window)
    return CommCost(total=total, exposed=exposed * (layouts.cp > 1))


def _expert(case: TrainCase, layouts: Layouts, wall: Array, *, moe: bool) -> CommCost:
    """Dispatch and combine, forward and backward: 4 all-to-alls of tokens·top_k·hidden."""
    zero = np.zeros(len(layouts))
    if not moe or case.model.moe is None:
        return CommCost(total=zero, exposed=zero)
    rows = case.tokens(layouts) / layouts.tp * case.model.moe.top_k
    size = rows * case.model.hidden * WIRE * layouts.expert_tp
    stride = np.where(layouts.expert_tp > 1, layouts.tp, 1)
    experts = case.model.moe
    copies = experts.top_k if case.software.flex_dispatch else None
    reach = (experts.groups, experts.top_groups)
    total = 4 * case.network.all_to_all_s(size, layouts.ep, stride, copies, reach) * case.software.communication
    hidden = (layouts.interleave > 1) & case.software.ep_overlap
    hidden |= (layouts.pp == 1) & case.software.ep_overlap_alone
    window = np.where(hidden, wall, 0.0)
    return CommCost(total=total, exposed=np.maximum(0.1 * total, total - window))


# --- once per step


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Wall time of one micro-batch on a stage, which can hide data-parallel communication."""

    forward: Array
    backward: Array


def data_parallel(
    case: TrainCase, layouts: Layouts, params: DeviceParameters, windows: Windows, micro_batches: Array
) -> tuple[CommCost, CommCost]:
    """(gradients, weights). Gradients are all-reduced (ZeRO 0) or reduce-scattered (1) beside the last backward pass;
    from ZeRO 2, which stores no full ones, beside every backward pass. Weights are all-gathered once per step beside
    the first forward pass (ZeRO 1 and 2), or before every use (ZeRO 3), where both share the backward window."""
    gather, scatter = _gather_s(case, layouts, params), _scatter_s(case, layouts, params)
    third, share = layouts.zero == 3, 1 - 1 / np.maximum(params.layers, 1)  # the first and last layer have no window
    sent = np.where(layouts.zero > 0, share, 1 - 1 / _buckets(case, layouts, params))
    overlap = 1.0 if case.software.dp_overlap else 0.0
    in_forward = _exposed(gather, share, windows.forward * overlap)
    in_backward = np.maximum(0.0, gather - windows.backward * overlap)
    left = np.where(third, np.maximum(windows.backward * overlap - gather, 0.0), windows.backward * overlap)
    grads = _exposed(scatter, sent, left)
    rounds = np.where(layouts.zero >= 2, micro_batches, 1.0)
    total = np.select([third, layouts.zero > 0], [2 * gather * micro_batches, gather], 0.0)
    exposed = np.select([third, layouts.zero > 0], [(in_forward + in_backward) * micro_batches, in_forward], 0.0)
    return CommCost(total=scatter * rounds, exposed=grads * rounds), CommCost(total=total, exposed=exposed)


def _buckets(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Buckets in which unsharded gradients are sent, at most one per layer; a small model sends one, at the end."""
    size = params.total * _trained_share(case, layouts, params) * case.software.grad_bytes
    return np.clip(np.ceil(size / layouts.bucket_bytes), 1.0, np.maximum(params.layers, 1.0))


def _exposed(seconds: Array, share: Array, window: Array) -> Array:
    """What a window leaves exposed of communication in chunks, one of which has no window."""
    return np.maximum(0.0, seconds * share - window) + seconds * (1 - share)


def _scatter_s(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Seconds to reduce all gradients; of the adapters alone with LoRA."""
    total = sum(_grad_s(case, layouts, params, which) for which in _classes(case))
    return total * _trained_share(case, layouts, params)


def _trained_share(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Share of the device's weights that are trained."""
    share = case.lora.per_device(layouts.tp) / np.maximum(params.total * layouts.pp, 1) if case.lora else 1.0
    return np.minimum(share, 1.0) * np.ones(len(layouts))


def _gather_s(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Seconds to all-gather all weights once; below ZeRO 3 only the trained ones, and in 8 bits where the GEMMs are
    (but not with fully_shard)."""
    narrow = NARROW[layouts.precision] & (layouts.zero < 3) & (not case.software.fully_shard)
    sizes = np.where(narrow, 1.0, 2.0)
    gather = case.network.flat_s if case.software.flat_gathers else case.network.gather_s
    total = np.zeros(len(layouts))
    for which in _classes(case):
        members, stride, count = _replicas(layouts, params, which)
        total = total + gather(count * sizes, _shard_counts(layouts, members), stride)
    return total * case.software.communication * np.where(layouts.zero < 3, _trained_share(case, layouts, params), 1.0)


def _shard_counts(layouts: Layouts, members: Ints) -> Ints:
    """Of the ranks with the same weights, those that shard one copy: dp (or its shard group) × cp."""
    return np.minimum(np.where(layouts.zero > 0, layouts.shard * layouts.cp, 1), members)


def _grad_s(case: TrainCase, layouts: Layouts, params: DeviceParameters, which: str) -> Array:
    """Seconds to reduce the gradients of one class of weights over the ranks that hold the same weights."""
    members, stride, count = _replicas(layouts, params, which)
    size = count * case.software.grad_bytes
    reduce = case.network.ring_s("all_reduce", size, members, stride)
    scatter = (case.network.flat_s if case.software.flat_gathers else case.network.gather_s)(size, members, stride)
    inside = _shard_counts(layouts, members)
    hybrid = (layouts.zero > 0) & (inside < members)  # reduce-scattered in a shard group, all-reduced across groups
    scattered = np.where(
        hybrid,
        case.network.ring_s("reduce_scatter", size, inside, stride)
        + case.network.ring_s("all_reduce", size / np.maximum(inside, 1), members // inside, stride * inside),
        scatter,
    )
    return np.where(layouts.zero == 0, reduce, scattered) * case.software.communication


def _classes(case: TrainCase) -> tuple[str, ...]:
    """Weights that have collectives of their own."""
    return ("dense", "experts") if case.model.num_moe_layers else ("dense",)


def _replicas(layouts: Layouts, params: DeviceParameters, which: str) -> tuple[Ints, Ints, Array]:
    """(ranks that hold the same weights, their stride, weights per rank)."""
    if which == "dense":
        return layouts.dp * layouts.cp, layouts.tp, params.dense
    shards = layouts.ep * layouts.expert_tp
    return np.maximum(layouts.dp * layouts.cp * layouts.tp // shards, 1), shards, params.routed


def pipeline_sends(case: TrainCase, layouts: Layouts, micro_batches: Array, chunk: Array) -> CommCost:
    """Hidden states to the next stage and gradients back: 2 sends per chunk and micro-batch, beside the next chunk
    where the schedule interleaves; the first and last pp − 1 have no window."""
    size = case.tokens(layouts) / layouts.stream_tp * case.model.hidden * WIRE
    send = case.network.send_s(size, layouts.tp * layouts.cp * layouts.dp) * case.software.communication
    times = 2 * layouts.interleave * micro_batches
    total = np.where(layouts.pp > 1, send * times, 0.0)
    overlaps = (layouts.interleave > 1) & case.software.pp_overlap
    exposed = np.where(overlaps, np.maximum(0.1 * send, send - chunk) * times, total)
    ends = 2 * (layouts.pp - 1) * send
    return CommCost(total=total, exposed=np.where(layouts.pp > 1, np.minimum(exposed + ends, total), 0.0))
