"""Peak memory: what is allocated beside weights and optimizer states, at six points of a step; the peak is the largest.

At the loss, all activations and the logits are allocated, but gradients only of earlier micro-batches. In the last
layer's backward pass the logits are freed, and what it recomputes is allocated beside all activations. At the end of
the backward pass every gradient is allocated, and the activations of one layer.
"""

from dataclasses import dataclass, fields

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import NONE, Array, Bools, Layouts
from armillary.planning.training.activations import (
    last_layer_bytes,
    layer_bytes,
    stored_bytes,
    stored_layer_bytes,
    top_bytes,
)
from armillary.planning.training.offload import activations_offloaded
from armillary.planning.training.optimizer_states import (
    StateBytes,
    casts_by_operator,
    fsdp_frozen,
    fsdp_full,
    matrix_bytes,
    sharded_bytes,
    trained_parameters,
)
from armillary.planning.training.stages import DeviceParameters
from armillary.planning.training.train_case import TrainCase

LOGIT_BYTES, EAGER_LOGIT_BYTES, ADAPTED_LOGIT_BYTES = 6.0, 12.0, 16.0
"""bytes per logit in the loss: 16 bits as computed and 32 as softmax; unfused also its gradient in 32 and 16, whether
or not torch compiles the layers below; and with an adapter on the output projection the adapter's part and the sum"""
LOSS_BYTES = 1.4e9
"""bytes that our fused loss uses for logits beyond the head's gradient (kernels.loss.linear_cross_entropy)"""
SHARDED_LOGIT_BYTES = 4.0
"""bytes per logit of a sharded vocabulary, beside the logit itself: its softmax, which its gradient overwrites"""
SNAPSHOTS = (
    "at the loss",
    "in the last layer's backward pass",
    "when the last layer's weights are all-gathered or its gradients reduced",
    "when the first layer's gradients are summed",
    "in the first layer's backward pass",
    "at the end of the backward pass",
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Bytes allocated at one point of a step, beside what is always there."""

    weights: Array
    """16-bit copies of weights that autocast makes and autograd frees"""
    gradients: Array
    activations: Array
    loss: Array
    buffers: Array

    @property
    def total(self) -> Array:
        return self.weights + self.gradients + self.activations + self.loss + self.buffers


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage of every layout."""

    case: TrainCase
    layouts: Layouts
    params: DeviceParameters
    states: StateBytes
    in_flight: Array
    """micro-batches whose activations it stores"""
    micro_batches: Array
    makes_logits: bool

    def snapshots(self) -> tuple[Snapshot, ...]:
        """In the order of SNAPSHOTS."""
        stored = stored_bytes(self.case, self.layouts, self.params.layers, self.in_flight)
        inside = layer_bytes(self.case, self.layouts)
        top = last_layer_bytes(self.case, self.layouts, self.params.layers)
        none, layer = np.zeros(len(stored)), stored / np.maximum(self.params.layers * self.in_flight, 1)
        early, summed, buffers = self._early_gradients, self._gradients, self._buffers_per_snapshot()
        pending = stored * (1 - 1 / self.in_flight)  # of the other micro-batches in flight
        head, final = np.maximum(early, np.minimum(self._head_gradient(), summed)), self._final_gradients()
        first = np.where(fsdp_full(self.case, self.layouts), early, head)  # there, the head's is freed with the root's
        on_device = (
            stored,
            stored + top,
            np.maximum(stored - layer, 0.0),
            pending,
            pending + layer + inside,
            pending,
        )
        offloaded = self._offloaded(top, inside)
        is_offloaded = activations_offloaded(self.layouts)
        columns = zip(
            self._autocast_copies(),
            (early, first, first, final, final, final),
            [np.where(is_offloaded, left, full) for left, full in zip(offloaded, on_device, strict=True)],
            (self._loss(), *[none] * 5),
            buffers,
            strict=True,
        )
        names = [field.name for field in fields(Snapshot)]
        return tuple(Snapshot(**dict(zip(names, values, strict=True))) for values in columns)

    # --- weights

    def _autocast_copies(self) -> tuple[Array, ...]:
        """Autocast stores a 16-bit copy of every weight to the end of the forward pass, the backward pass those of
        layers without recompute."""
        params, none = self.params, np.zeros(len(self.layouts))
        if not self.case.software.eager_layers:
            return (none,) * 6
        each = np.where(casts_by_operator(self.case, self.layouts), self.states.weight, 0.0)
        recomputed = (self.layouts.recompute != NONE) / self.layouts.recompute_every
        layer = each * (params.layer + params.experts)
        stored = np.maximum(layer * params.layers * (1 - recomputed), layer)
        forward = layer * params.layers + each * self._table
        return forward, stored, np.maximum(stored - layer, 0.0), none, layer, none

    # --- activations and logits

    def _offloaded(self, top: Array, inside: Array) -> tuple[Array, ...]:
        """Activations on the device where they are offloaded: the last layer's stay, and the backward pass prefetches
        the next layer's while it runs one."""
        layer, above = stored_layer_bytes(self.case, self.layouts), top_bytes(self.case, self.layouts)
        two, pending = np.minimum(self.params.layers, 2.0) * layer, (self.in_flight - 1) * layer
        return (
            pending + layer + above,
            pending + two + above + top,
            pending + two - layer,
            pending,
            pending + two + inside,
            pending,
        )

    def _loss(self) -> Array:
        case, layouts = self.case, self.layouts
        tokens = case.tokens(layouts)
        rows = np.minimum(tokens, case.loss_chunk) if case.loss_chunk else tokens
        logits = rows * case.model.vocab / layouts.tp * (1 + case.extra_heads)
        if case.software.fused_loss:
            unsharded = layouts.tp == 1  # the fused loss does not run on a sharded vocabulary
            bytes_ = np.where(unsharded, self._fused_loss(tokens), logit_bytes(case, layouts) * logits)
        else:
            bytes_ = logit_bytes(case, layouts) * logits
        if case.software.eager_layers and case.lora is None:  # or the head's gradient beside that of the logits
            bytes_ = np.maximum(bytes_, 4.0 * logits + self._table * self.states.weight)
        return bytes_ if self.makes_logits else 0 * bytes_

    def _fused_loss(self, tokens: Array) -> Array:
        """Logits in even chunks of as many tokens as fit LOSS_BYTES; gradients of the hidden states and of the head,
        the latter in fp32 where chunks are summed."""
        model, size = self.case.model, np.where(WIDE[self.layouts.precision], 4.0, 2.0)
        head = 0.0 if self.case.lora is not None else float(model.vocab * model.hidden)
        capacity = np.maximum((LOSS_BYTES + head * size) / (model.vocab * size), 1.0)
        chunks = np.ceil(tokens / capacity)
        logits = np.ceil(tokens / chunks) * model.vocab * size
        return logits + tokens * model.hidden * size + head * np.where(chunks > 1, 4.0, size)

    # --- gradients

    @property
    def _gradients(self) -> Array:
        """Of a full step; fully_shard shards them whatever the ZeRO stage, unless micro-batches are summed first."""
        case, layouts, states = self.case, self.layouts, self.states
        usual = sharded_bytes(case, layouts, self.params, states.gradient, 2)
        at_once = fsdp_full(case, layouts) & (self.micro_batches <= 1)
        return np.where(at_once, sharded_bytes(case, layouts, self.params, states.gradient, 1), usual)

    @property
    def _early_gradients(self) -> Array:
        """Of earlier micro-batches, while this one's activations are stored."""
        return np.where(self._accumulates, self._gradients, 0.0)

    @property
    def _accumulates(self) -> Bools:
        """Whether earlier micro-batches of the step have left gradients."""
        return self.micro_batches > self.in_flight

    def _final_gradients(self) -> Array:
        """In the first layer's backward pass; fully_shard's root runs after it, so the root's gradients are those of
        earlier micro-batches, if any."""
        params, states, layouts = self.params, self.states, self.layouts
        shared = np.where((layouts.zero > 1) | (self.micro_batches <= 1), layouts.state_shards[0], 1.0)
        root = params.ends * states.gradient / shared
        earlier = self.micro_batches >= np.where(layouts.zero == 3, 2, 3)
        return self._gradients - np.where(fsdp_full(self.case, layouts) & ~earlier, root, 0.0)

    def _head_gradient(self) -> Array:
        """The output projection's: the first to be computed."""
        if self.case.lora is not None or not self.makes_logits:
            return np.zeros(len(self.layouts))
        return self._table * self.states.gradient / np.where(self.layouts.zero >= 2, self.layouts.state_shards[0], 1)

    @property
    def _table(self) -> Array:
        """Parameters of the output projection."""
        both = (self.layouts.pp == 1) & (not self.case.model.tied)
        return self.params.ends / np.where(both, 2.0, 1.0)

    # --- all-gathered weights, and gradients being reduced

    def _buffers_per_snapshot(self) -> list[Array]:
        usual, last = self._buffers(), 0.0
        if self.case.software.eager_layers and self.case.lora is None:
            # a gradient that is added to an earlier one: the largest matrix is about half of a layer
            usual = usual + np.where(self._accumulates, 0.5 * self.params.layer * self.states.weight, 0.0)
            last = self._tables_at_end()
        unsharded = (self._buffers(), usual, 0 * usual, 0 * usual, usual, last + 0 * usual)
        if self.case.lora is not None:
            is_sharded, gathered = fsdp_frozen(self.case, self.layouts), self._gathered_frozen()
        else:
            is_sharded, gathered = fsdp_full(self.case, self.layouts), self._gathered()
        return [np.where(is_sharded, fsdp, other) for fsdp, other in zip(gathered, unsharded, strict=True)]

    def _gathered_frozen(self) -> tuple[Array, ...]:
        """ZeRO 3 all-gathers a frozen layer and prefetches the next, the head stays; ZeRO 1 and 2 all-gather all. An
        all-gather is copied out of its receive buffer, while the previous layer's may still be allocated. Gradients of
        adapters are small."""
        params, third = self.params, self.layouts.zero == 3
        layer = (params.layer + params.experts) * matrix_bytes(self.case, self.layouts, self.states)
        next_ = np.where(params.layers > 1, layer, 0.0)
        root = np.where(third, self._table, params.ends) * self.states.weight
        full, received = layer * params.layers + root, layer + next_
        by_layer = (root, root + layer + next_, root + layer + received, root, root + layer, root)
        at_once = (full, full, full + received, full, full, full)
        return tuple(np.where(third, layered, once) for layered, once in zip(by_layer, at_once, strict=True))

    def _tables_at_end(self) -> Array:
        """Autograd sums both gradients of a tied table before it frees either, and adds to an earlier one last; or a
        bucket is filled while its parts are still allocated."""
        table = self._table * self.states.weight
        new = (2.0 if self.case.model.tied else 0.0) + self._accumulates
        number = self.params.total * self.states.gradient
        bucket = np.where(self.layouts.dp > 1, np.minimum(self.layouts.bucket_bytes, number), 0.0)
        return np.maximum(new * table, bucket + (table if self.case.model.tied else 0.0))

    def _buffers(self) -> Array:
        """ZeRO 3: two all-gathered layers and one layer's full gradient (frozen layers have none); ZeRO 1 and 2: a
        bucket being reduced."""
        case, layouts, params, states = self.case, self.layouts, self.params, self.states
        dense_shared, routed_shared = layouts.state_shards
        # beside the device's own shard
        layer = params.layer * (1 - 1 / dense_shared) + params.experts * (1 - 1 / routed_shared)
        weight = matrix_bytes(case, layouts, states)
        gathered = np.minimum(2.0, params.layers) * layer * weight + (0.0 if case.lora else layer * states.gradient)
        number = sum(trained_parameters(case, layouts, params), np.zeros(len(layouts)))
        bucket = np.where(layouts.zero > 0, np.minimum(2.0 * layouts.bucket_bytes, number * states.gradient), 0.0)
        return np.where(layouts.zero == 3, gathered, bucket)

    def _gathered(self) -> tuple[Array, ...]:
        """ZeRO 3 all-gathers a layer and prefetches the next, ZeRO 1 and 2 all of them until their last backward pass;
        embedding, head and last norm stay. A layer's gradient is full until it is copied to be reduce-scattered, and
        the copy stays until the next layer's; the root's gradients are full to the end."""
        params, weight, third = self.params, self.states.weight, self.layouts.zero == 3
        layer, table = params.layer + params.experts, self._table * weight
        root, full = np.where(third, self._table, params.ends) * weight, params.total * weight
        next_ = np.where(params.layers > 1, layer * weight, 0.0)
        waits = self._accumulates & (self.layouts.zero == 1)  # reduced only after the last micro-batch
        concatenated = weight if self.case.software.eager_layers else 0.0  # before it is widened: two operators on CPUs
        copies = weight + np.where(weight < 4.0, concatenated, 0.0) + 4.0
        leaving = np.where(waits, 0.0, layer * (copies + 4.0 / self.layouts.state_shards[0]))
        inside = np.where(third, root + layer * weight + next_, full) + np.where(waits, 0.5 * layer * weight, 0.0)
        first = np.where(third, root + next_, np.where(self._accumulates, full, full - layer * weight))
        left = np.where(third | ~self._accumulates, root, full)
        before = np.where(waits, 0.0, layer * 4.0)
        pending = np.where(waits & (not self.case.model.tied), 0.0, table)  # the head's gradient, until the root's
        first_layer = np.where(third | ~self._accumulates, root + layer * weight, full)
        return (
            np.where(third, root, full),
            inside + pending,
            first + pending + leaving,
            left + pending + leaving,
            first_layer + pending + before,
            left + before + self._root_gradients(),
        )

    def _root_gradients(self) -> Array:
        """Gradients of embedding and head: a tied table's two and their sum, or all as they are copied to be
        reduce-scattered."""
        weight, table = self.states.weight, self._table
        copied = np.where(self._accumulates & (self.layouts.zero == 1), 0.0, 4.0)
        if self.case.model.tied:
            return table * np.maximum(3 * weight, weight + copied)
        apart = np.where(self.layouts.zero == 3, self.params.ends - table, 0.0)  # all-gathered again for its gradient
        inner = self.params.ends - apart
        summed = copied * (1 + 1 / self.layouts.state_shards[0])
        return np.where(apart > 0, apart * (2 * weight + summed) + inner * weight, inner * (weight + copied))


def logit_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes that the loss stores per logit."""
    unknown = case.lora is not None and case.lora.on is None  # adapters may be on the head; ours never are
    unfused = ADAPTED_LOGIT_BYTES if unknown else EAGER_LOGIT_BYTES
    fused = case.software.fused_cross_entropy or case.software.fused_loss
    alone = LOGIT_BYTES if fused else unfused
    sharded = SHARDED_LOGIT_BYTES + np.where(WIDE[layouts.precision], 4.0, 2.0)
    return np.where((layouts.tp > 1) & case.software.eager_layers, sharded, alone)
