"""The one place where a layout is applied to a model, and the order of it can be read.

Tensor parallelism cuts layers, recompute wraps what is left of them, compile sees both, and the data axes share out
the result last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from armillary.model.transformer import Transformer
from armillary.parallel import data, vocabulary
from armillary.parallel.clip import clip
from armillary.parallel.collectives import Group
from armillary.parallel.compiling import can_fold, compile_blocks
from armillary.parallel.mesh import DATA_AXES, Mesh
from armillary.parallel.recompute import recompute, recomputed
from armillary.parallel.replicate import Replicas, sum_partial
from armillary.parallel.tensor import cut_by_tensor, refuse_uneven
from armillary.spec.layout import Layout
from armillary.spec.layout_rules import check_layout

LossSum = Callable[..., Tensor]
"""loss_sum(model, hidden, targets, chunk=…) of a model that holds its whole head"""


def apply(
    model: Transformer, layout: Layout, mesh: Mesh, *, loss: LossSum | None = None, compile: bool = False
) -> Sharded:
    """Spread a model, on meta or with weights, over the mesh. `loss` is used where the vocabulary is not cut."""
    check_layout(layout, model.config, num_devices=mesh.world.size)
    tp = cut_tokens = None
    if layout.tp > 1:
        cut_tokens = layout.sequence_parallel
        kept = set(model.blocks) - set(recomputed(model, kind=layout.recompute, every=layout.recompute_every))
        tp = cut_by_tensor(model, mesh.along("tp"), cut_tokens=cut_tokens, gather_again=kept)
    recompute(model, kind=layout.recompute, every=layout.recompute_every)
    if compile:
        compile_blocks(model, tp, overlap=bool(cut_tokens) and can_fold(mesh))
    if layout.zero and mesh.dp_size > 1:
        axes = [axis for axis in DATA_AXES if mesh.size(axis) > 1 or axis == "shard"]
        data.shard_out(model, mesh.along(*axes), zero=layout.zero, precision=layout.precision)
    return Sharded(model, layout, mesh, tp=tp, cut_tokens=bool(cut_tokens), loss=loss)


class Sharded:
    """A model spread over a mesh, and what a training step asks of it."""

    def __init__(
        self, model: Transformer, layout: Layout, mesh: Mesh, *, tp: Group | None, cut_tokens: bool,
        loss: LossSum | None,
    ) -> None:  # fmt: skip
        self.model, self.layout, self.mesh = model, layout, mesh
        self._tp, self._cut_tokens, self._loss = tp, cut_tokens, loss
        if tp is not None and cut_tokens:
            model.register_forward_pre_hook(lambda _, args: refuse_uneven(args[0].shape[1], tp.size))

    @property
    def is_fsdp(self) -> bool:
        """Weights are shards between steps, and are cast as they are gathered: no autocast is needed."""
        return isinstance(self.model, FSDPModule)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward; gradients are whole sums after the last."""
        if self.is_fsdp:
            with data.micro_batch(self.model, zero=self.layout.zero, last=last):
                yield
            return
        if last and self._replicas is not None:
            self._replicas.arm()
        yield
        if last:
            self._finish_gradients()

    @cached_property
    def _replicas(self) -> Replicas | None:
        """Made when first asked for, because filling a model from meta makes new parameters."""
        group = None if self.is_fsdp else self.mesh.group("replicate")
        if group is None:
            return None
        return Replicas(self.model.parameters(), group, bucket_bytes=self.layout.bucket_bytes)

    def _finish_gradients(self) -> None:
        if self._replicas is not None:
            self._replicas.finish()
        group = self.mesh.group("tp")
        if group is not None:
            sum_partial(self.model.parameters(), group)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward passes without backward ones; weights that were gathered are shards again afterwards."""
        with torch.no_grad():
            yield
        if self.is_fsdp:
            data.reshard(self.model)

    def loss_sum(self, hidden: Tensor, targets_BT: Tensor, *, chunk: int = 0) -> Tensor:
        """Sum of the losses of this rank's rows, the same on all tensor-parallel ranks."""
        if self._tp is not None:
            return vocabulary.loss_sum(
                self.model, hidden, targets_BT, chunk=chunk, group=self._tp, cut_tokens=self._cut_tokens
            )
        assert self._loss is not None, "a loss for heads that are whole is handed to apply"
        return self._loss(self.model, hidden, targets_BT, chunk=chunk)

    def clip(self, limit: float) -> Tensor:
        """The gradients' norm over the whole mesh before clipping to `limit`; 0 only measures."""
        return clip(self.model.parameters(), self.mesh, limit)

    def total(self, value: Tensor) -> Tensor:
        """The sum of a value over the ranks that read different rows."""
        value = value.detach().clone()
        for axis in DATA_AXES:
            group = self.mesh.group(axis)
            if group is not None:
                dist.all_reduce(value, group=group)
        return value
