"""Moments: what is there beside weights and optimiser states, and when; a step's peak is the fullest of them.

At the loss all activations and the logits stand, but gradients only of earlier micro-batches. When the last layer is
differentiated the logits are gone, and what it makes again stands beside the activations of all. At the end of the
backward pass every gradient is there, and the activations of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.layout_arrays import NONE, Array, Bools, Layouts
from armillary.planning.training.activations import (
    last_layer_bytes,
    layer_bytes,
    stored_bytes,
    stored_layer_bytes,
    top_bytes,
)
from armillary.planning.training.offload import activations_out
from armillary.planning.training.optimizer_states import (
    StateBytes,
    by_layer,
    casts_by_operator,
    frozen_by_layer,
    matrix_bytes,
    shared_out,
    sharers,
    trained,
)
from armillary.planning.training.parameters_per_device import Held
from armillary.planning.training.train_case import TrainCase

LOGIT_BYTES, EAGER_LOGIT_BYTES, ADAPTED_LOGIT_BYTES = 6.0, 12.0, 16.0
"""of one logit in the loss: 16 bits as made and 32 as softmax; unfused also its gradient in 32 and 16; and with an
adapter on the output projection the adapter's share and the sum"""
LOSS_BYTES = 1.4e9
"""what our fused loss takes for logits beyond the bytes of the head's gradient (kernels.linear_cross_entropy)"""
CUT_LOGIT_BYTES = 4.0
"""where our trainer cuts the vocabulary over ranks, beside the logit as made: its softmax, replaced by its gradient"""
MOMENTS = (
    "at the loss",
    "in the last layer's backward pass",
    "when the last layer's weights or gradients travel",
    "when the first layer's gradients are summed",
    "in the first layer's backward pass",
    "at the end of the backward pass",
)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes that are there at one moment, beside what is always there."""

    weights: Array
    """copies of weights that autocast makes and autograd lets go"""
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
    mine: Held
    """parameters of a device"""
    states: StateBytes
    """bytes of each"""
    flying: Array
    """micro-batches whose activations it holds"""
    micro_batches: Array
    """of a step"""
    makes_logits: bool
    """it holds the output projection"""

    def moments(self) -> tuple[Moment, ...]:
        """In the order of MOMENTS."""
        stored = stored_bytes(self.case, self.layouts, self.mine.layers, self.flying)
        inside = layer_bytes(self.case, self.layouts)
        top = last_layer_bytes(self.case, self.layouts, self.mine.layers)
        none, of_one = np.zeros(len(stored)), stored / np.maximum(self.mine.layers * self.flying, 1)
        early, summed, buffers = self._early_gradients, self._gradients, self._buffers_at_moments()
        others = stored * (1 - 1 / self.flying)  # of micro-batches that are still on their way
        head, late = np.maximum(early, np.minimum(self._head_gradient(), summed)), self._late_gradients()
        first = np.where(by_layer(self.case, self.layouts), early, head)  # there, the head's leaves with the root
        here = (stored, stored + top, np.maximum(stored - of_one, 0.0), others, others + of_one + inside, others)
        out = activations_out(self.layouts)
        activations = [np.where(out, left, all_) for left, all_ in zip(self._left(top, inside), here, strict=True)]
        columns = zip(
            self._copies(),
            (early, first, first, late, late, late),
            activations,
            (self._loss(), *[none] * 5),
            buffers,
            strict=True,
        )
        return tuple(
            Moment(weights=weights, gradients=gradients, activations=acts, loss=loss, buffers=gathered)
            for weights, gradients, acts, loss, gathered in columns
        )

    # --- weights

    def _copies(self) -> tuple[Array, ...]:
        """Autocast keeps a half-precision copy of every weight to the end of the forward pass, the backward pass those
        of layers that it did not have to make again."""
        mine, none = self.mine, np.zeros(len(self.layouts))
        if not self.case.software.plain_layers:
            return (none,) * 6
        each = np.where(casts_by_operator(self.case, self.layouts), self.states.weight, 0.0)
        layer, again = mine.layer + mine.experts, (self.layouts.recompute != NONE) / self.layouts.recompute_every
        one = each * layer
        kept = np.maximum(one * mine.layers * (1 - again), one)
        return one * mine.layers + each * self._table, kept, np.maximum(kept - one, 0.0), none, one, none

    # --- activations and logits

    def _left(self, top: Array, inside: Array) -> tuple[Array, ...]:
        """Where activations wait on the host: the last layer's stay, and the backward pass has the next layer's come
        while it differentiates one."""
        one, above = stored_layer_bytes(self.case, self.layouts), top_bytes(self.case, self.layouts)
        two, others = np.minimum(self.mine.layers, 2.0) * one, (self.flying - 1) * one
        return (
            others + one + above,
            others + two + above + top,
            others + two - one,
            others,
            others + two + inside,
            others,
        )

    def _loss(self) -> Array:
        case, layouts = self.case, self.layouts
        tokens = layouts.micro_batch * case.sequence / layouts.cp
        rows = np.minimum(tokens, case.loss_chunk) if case.loss_chunk else tokens
        logits = rows * case.model.vocab / layouts.tp * (1 + case.extra_heads)
        if case.software.fused_loss:
            whole = layouts.tp == 1  # a vocabulary that is cut over ranks takes the plain form
            bytes_ = np.where(whole, self._fused_loss(tokens), logit_bytes(case, layouts) * logits)
        else:
            bytes_ = logit_bytes(case, layouts) * logits
        if case.software.plain_layers and case.lora is None:  # or the projection's gradient beside that of the logits
            bytes_ = np.maximum(bytes_, 4.0 * logits + self._table * self.states.weight)
        return bytes_ if self.makes_logits else 0 * bytes_

    def _fused_loss(self, tokens: Array) -> Array:
        """Logits of as many tokens as there is room for, in even chunks; the hidden states' gradient, and the head's,
        in fp32 where chunks are summed."""
        model, size = self.case.model, np.where(WIDE[self.layouts.precision], 4.0, 2.0)
        head = 0.0 if self.case.lora is not None else float(model.vocab * model.hidden)
        room = np.maximum((LOSS_BYTES + head * size) / (model.vocab * size), 1.0)
        chunks = np.ceil(tokens / room)
        logits = np.ceil(tokens / chunks) * model.vocab * size
        found: Array = logits + tokens * model.hidden * size + head * np.where(chunks > 1, 4.0, size)
        return found

    # --- gradients

    @property
    def _gradients(self) -> Array:
        """Of a whole step; fully_shard shares them out whatever the stage, unless micro-batches are summed first."""
        case, layouts, states = self.case, self.layouts, self.states
        usual = shared_out(case, layouts, self.mine, states.gradient, 2)
        at_once = by_layer(case, layouts) & (self.micro_batches <= 1)
        return np.where(at_once, shared_out(case, layouts, self.mine, states.gradient, 1), usual)

    @property
    def _early_gradients(self) -> Array:
        """Of micro-batches that are through, while this one's activations are kept."""
        return np.where(self._more, self._gradients, 0.0)

    @property
    def _more(self) -> Bools:
        more: Bools = self.micro_batches > self.flying
        return more

    def _late_gradients(self) -> Array:
        """When the first layer is differentiated; fully_shard's root comes after it, so that its gradients are those of
        earlier micro-batches, if any."""
        mine, states, layouts = self.mine, self.states, self.layouts
        shared = np.where((layouts.zero > 1) | (self.micro_batches <= 1), sharers(layouts)[0], 1.0)
        root = mine.ends * states.gradient / shared
        earlier = self.micro_batches >= np.where(layouts.zero == 3, 2, 3)
        without = by_layer(self.case, layouts) & ~earlier
        late: Array = self._gradients - np.where(without, root, 0.0)
        return late

    def _head_gradient(self) -> Array:
        """The output projection's: the first that is made."""
        if self.case.lora is not None or not self.makes_logits:
            return np.zeros(len(self.layouts))
        return self._table * self.states.gradient / np.where(self.layouts.zero >= 2, sharers(self.layouts)[0], 1)

    @property
    def _table(self) -> Array:
        """Weights of the output projection."""
        both = (self.layouts.pp == 1) & (not self.case.model.tied)
        return self.mine.ends / np.where(both, 2.0, 1.0)

    # --- gathered weights, and gradients on their way

    def _buffers_at_moments(self) -> list[Array]:
        usual, last = self._buffers(), 0.0
        if self.case.software.plain_layers and self.case.lora is None:
            # a gradient that is added to an earlier one: a layer's largest matrix is near half of it
            usual = usual + np.where(self._more, 0.5 * self.mine.layer * self.states.weight, 0.0)
            last = self._tables_at_end()
        others = (self._buffers(), usual, 0 * usual, 0 * usual, usual, last + 0 * usual)
        if self.case.lora is not None:
            mask, gathered = frozen_by_layer(self.case, self.layouts), self._frozen_gathered()
        else:
            mask, gathered = by_layer(self.case, self.layouts), self._fully_shard()
        return [np.where(mask, mine, other) for mine, other in zip(gathered, others, strict=True)]

    def _frozen_gathered(self) -> tuple[Array, ...]:
        """Stage 3 gathers a frozen layer and the next, the head stays; stages 1 and 2 gather all. What is gathered is
        copied from where it arrived, where the layer before had arrived too. Gradients of adapters are small."""
        mine, third = self.mine, self.layouts.zero == 3
        layer = (mine.layer + mine.experts) * matrix_bytes(self.case, self.layouts, self.states)
        next_ = np.where(mine.layers > 1, layer, 0.0)
        root = np.where(third, self._table, mine.ends) * self.states.weight
        all_, arrived = layer * mine.layers + root, layer + next_
        by_one = (root, root + layer + next_, root + layer + arrived, root, root + layer, root)
        at_once = (all_, all_, all_ + arrived, all_, all_, all_)
        return tuple(np.where(third, one, other) for one, other in zip(by_one, at_once, strict=True))

    def _tables_at_end(self) -> Array:
        """Autograd sums both gradients of a tied table before it lets go of either, and adds to an earlier one last;
        or a bucket is filled while its parts still stand."""
        table = self._table * self.states.weight
        new = (2.0 if self.case.model.tied else 0.0) + self._more
        number = self.mine.total * self.states.gradient
        bucket = np.where(self.layouts.dp > 1, np.minimum(self.layouts.bucket_bytes, number), 0.0)
        tables: Array = np.maximum(new * table, bucket + (table if self.case.model.tied else 0.0))
        return tables

    def _buffers(self) -> Array:
        """zero 3: two layers gathered and one layer's whole gradient (frozen layers have none); zero 1 and 2: a bucket
        on its way."""
        case, layouts, mine, states = self.case, self.layouts, self.mine, self.states
        dense_shared, routed_shared = sharers(layouts)
        # beside the device's own part
        layer = mine.layer * (1 - 1 / dense_shared) + mine.experts * (1 - 1 / routed_shared)
        weight = matrix_bytes(case, layouts, states)
        whole = np.minimum(2.0, mine.layers) * layer * weight + (0.0 if case.lora else layer * states.gradient)
        number = sum(trained(case, layouts, mine), np.zeros(len(layouts)))
        bucket = np.where(layouts.zero > 0, np.minimum(2.0 * layouts.bucket_bytes, number * states.gradient), 0.0)
        bytes_: Array = np.where(layouts.zero == 3, whole, bucket)
        return bytes_

    def _fully_shard(self) -> tuple[Array, ...]:
        """Stage 3 gathers a layer and the next, stages 1 and 2 all, until they are differentiated for the last time;
        embedding, head and last norm stay. A layer's gradient is whole until it is summed and copied to travel, and the
        copy stays until the next goes; the root's are whole to the end."""
        mine, weight, third = self.mine, self.states.weight, self.layouts.zero == 3
        layer, table = mine.layer + mine.experts, self._table * weight
        root, all_ = np.where(third, self._table, mine.ends) * weight, mine.total * weight
        next_ = np.where(mine.layers > 1, layer * weight, 0.0)
        waits = self._more & (self.layouts.zero == 1)  # nothing is summed before the last micro-batch
        joined = weight if self.case.software.plain_layers else 0.0  # before it is widened: two operators on a CPU
        copies = weight + np.where(weight < 4.0, joined, 0.0) + 4.0
        leaving = np.where(waits, 0.0, layer * (copies + 4.0 / sharers(self.layouts)[0]))
        inside = np.where(third, root + layer * weight + next_, all_) + np.where(waits, 0.5 * layer * weight, 0.0)
        first = np.where(third, root + next_, np.where(self._more, all_, all_ - layer * weight))
        left = np.where(third | ~self._more, root, all_)
        before = np.where(waits, 0.0, layer * 4.0)
        pending = np.where(waits & (not self.case.model.tied), 0.0, table)  # the head's gradient, until the root's go
        again = np.where(third | ~self._more, root + layer * weight, all_)
        return (
            np.where(third, root, all_),
            inside + pending,
            first + pending + leaving,
            left + pending + leaving,
            again + pending + before,
            left + before + self._root_leaves(),
        )

    def _root_leaves(self) -> Array:
        """Gradients of embedding and head: a tied table's two and their sum, or all as they are copied to travel."""
        weight, table = self.states.weight, self._table
        copied = np.where(self._more & (self.layouts.zero == 1), 0.0, 4.0)
        if self.case.model.tied:
            return table * np.maximum(3 * weight, weight + copied)
        apart = np.where(self.layouts.zero == 3, self.mine.ends - table, 0.0)  # gathered again for its gradient
        inner = self.mine.ends - apart
        summed = copied * (1 + 1 / sharers(self.layouts)[0])
        left: Array = np.where(apart > 0, apart * (2 * weight + summed) + inner * weight, inner * (weight + copied))
        return left


def logit_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes that the loss keeps of one logit."""
    unknown = case.lora is not None and case.lora.on is None  # adapters may be anywhere; ours leave the head alone
    unfused = ADAPTED_LOGIT_BYTES if unknown else EAGER_LOGIT_BYTES
    alone = LOGIT_BYTES if case.software.fused_layers else unfused
    cut = CUT_LOGIT_BYTES + np.where(WIDE[layouts.precision], 4.0, 2.0)
    return np.where((layouts.tp > 1) & case.software.plain_layers, cut, alone)
