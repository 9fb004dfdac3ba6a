"""The one place where a layout is applied to a model, and the order of it can be read.

Tensor parallelism cuts layers, recompute wraps what is left of them, compile sees both, offload takes what they keep,
and the data axes share out the result last. A pipeline stage holds some of the layers and is treated alike; its chunks
are shared out one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import full_names
from armillary.parallel import fsdp as data
from armillary.parallel import vocabulary
from armillary.parallel.collectives import Clock, Group
from armillary.parallel.compile_blocks import can_fold, compile_blocks
from armillary.parallel.context.shard_sequence import Context, agree_on_length
from armillary.parallel.ddp import Replicas, sum_partial
from armillary.parallel.expert.shard_experts import cut_experts, is_of_expert, shard_experts
from armillary.parallel.grad_norm import clip
from armillary.parallel.mesh import DATA_AXES, Mesh
from armillary.parallel.offload import Activations, offload_activations
from armillary.parallel.pipeline.pipeline import make_pipeline
from armillary.parallel.pipeline.stage import Chunk, Held
from armillary.parallel.recompute import recompute, recomputed_blocks
from armillary.parallel.shard_weights import whole
from armillary.parallel.tensor import cut_by_tensor, refuse_uneven
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout

LossSum = Callable[..., Tensor]
"""loss_sum(model, hidden, targets, chunk=…) of a model that holds its whole head"""


def apply(
    model: Transformer, layout: Layout, mesh: Mesh, *, loss: LossSum | None = None, compile: bool = False
) -> Sharded:
    """Spread a model, on meta or with weights, over the mesh. `loss` is used where the vocabulary is not cut."""
    check_layout(layout, model.config, num_devices=mesh.world.size, by_trainer=True, compiled=compile)
    assert (layout.pp > 1) == isinstance(model, Held), "stages are held by pipeline_stage.hold"
    tp = cut_tokens = None
    if layout.tp > 1:
        cut_tokens = layout.sequence_parallel
        kept = set(model.blocks) - set(recomputed_blocks(model, kind=layout.recompute, every=layout.recompute_every))
        tp = cut_by_tensor(model, mesh.along("tp"), cut_tokens=cut_tokens, gather_again=kept)
    ep = cut_experts(model, mesh)
    recompute(model, kind=layout.recompute, every=layout.recompute_every)
    if compile:
        compile_blocks(model, tp, overlap=bool(cut_tokens) and can_fold(mesh))
    out = layout.offload in ("activations", "both")
    activations = offload_activations(model, mesh.world.device) if out else None
    chunks = [Chunk(model, span) for span in model.spans] if isinstance(model, Held) else [model]
    if layout.zero and mesh.num_copies > 1:
        axes = [axis for axis in DATA_AXES if mesh.size(axis) > 1 or axis == "shard"]
        for chunk in chunks:
            unseen = layout.recompute == "selective"
            shard_experts(chunk, mesh, data.policy_of(layout.precision), again=layout.zero == 3, unseen=unseen)
            data.shard_out(chunk, mesh.along(*axes), zero=layout.zero, precision=layout.precision)
    return Sharded(
        model,
        layout,
        mesh,
        chunks=chunks,
        tp=tp,
        ep=ep,
        cut_tokens=bool(cut_tokens),
        loss=loss,
        activations=activations,
    )


class Sharded:
    """A model spread over a mesh, and what a training step asks of it."""

    def __init__(
        self,
        model: Transformer,
        layout: Layout,
        mesh: Mesh,
        *,
        chunks: list[Any],
        tp: Group | None,
        ep: Group | None,
        cut_tokens: bool,
        loss: LossSum | None,
        activations: Activations | None = None,
    ) -> None:
        self.model, self.layout, self.mesh, self._chunks = model, layout, mesh, chunks
        self._tp, self._ep, self._cut_tokens, self._loss = tp, ep, cut_tokens, loss
        self.context = None if mesh.context is None else Context.of(mesh.context)
        """how rows are cut among the ranks that share them; None where they are not"""
        if self.context is not None:
            agree_on_length(model, self.context)
        self.pipeline = make_pipeline(model, chunks, layout, mesh) if isinstance(model, Held) else None
        """the stages, through which micro-batches are passed; None where the model is called by itself"""
        self.activations = activations
        """those that wait in host memory; None where they stay"""
        if tp is not None and cut_tokens and model.embedding is not None:
            chunks[0].register_forward_pre_hook(lambda _, args: refuse_uneven(args[0].shape[1], tp.size))

    @property
    def is_fsdp(self) -> bool:
        """Weights are shards between steps, and are cast as they are gathered: no autocast is needed."""
        return isinstance(self._chunks[0], FSDPModule)

    def add_timer(self, clock: Clock) -> None:
        """`clock` hears of every exchange of tensor and expert parallelism from now on."""
        for group in (self._tp, self._ep):
            if group is not None:
                group.clocks.append(clock)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward; gradients are whole sums after the last."""
        if self.is_fsdp:
            with data.micro_batch(self.model, zero=self.layout.zero, last=last):
                yield
            return
        for replicas in self._replicas if last else ():
            replicas.arm()
        yield
        if last:
            self.finish_gradients()

    @cached_property
    def _replicas(self) -> list[Replicas]:
        """Who sums which gradients: all copies, but for experts only the ranks with the same ones. Made when first
        asked for, because filling a model from meta makes new parameters."""
        if self.is_fsdp:
            return []
        experts, others = (
            [p for p in self.model.parameters() if is_of_expert(p) is wanted] for wanted in (True, False)
        )
        by_group = {self.mesh.group("replicate"): others, self.mesh.group("expert_replicate"): experts}
        return [
            Replicas(parameters, group, bucket_bytes=self.layout.bucket_bytes)
            for group, parameters in by_group.items()
            if group is not None
        ]

    def finish_gradients(self) -> None:
        """Sum over ranks what the backward passes of a step left as parts."""
        for replicas in self._replicas:
            replicas.finish()
        group = self.mesh.group("tp")
        if group is not None and not self.is_fsdp:
            sum_partial(self.model.parameters(), group)
        if self.pipeline is not None:
            self.pipeline.sum_tied()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward passes without backward ones, nor anything that only training does (dropout); weights that were
        gathered are shards again afterwards."""
        before = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(before)
        if self.is_fsdp:
            for chunk in self._chunks:
                data.reshard(chunk)

    def loss_sum(
        self, hidden: Tensor, targets_BT: Tensor, *, chunk: int = 0, model: Transformer | None = None
    ) -> Tensor:
        """Sum of the losses of this rank's rows, the same on all tensor-parallel ranks; `model` is the one with the
        head, where that is not all of it."""
        model = model or self.model
        if self._tp is not None:
            return vocabulary.loss_sum(
                model, hidden, targets_BT, chunk=chunk, group=self._tp, cut_tokens=self._cut_tokens
            )
        assert self._loss is not None, "a loss for heads that are whole is handed to apply"
        return self._loss(model, hidden, targets_BT, chunk=chunk)

    def clip(self, limit: float) -> Tensor:
        """The gradients' norm over the whole mesh before clipping to `limit`; 0 only measures."""
        return clip(self.model.parameters(), self.mesh, limit, copies=self._copies)

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm over all stages, of one that counts what this stage holds."""
        if self.pipeline is None:
            return norm
        twice = [p.grad.norm() for p in self._copies if p.grad is not None]
        squares = norm.square() - sum(each.square() for each in twice)
        dist.all_reduce(squares, group=self.pipeline.group)
        return squares.sqrt()

    @property
    def _copies(self) -> list[Tensor]:
        """Parameters that another stage holds too and counts."""
        if not isinstance(self.model, Held) or not self.model.has_copy:
            return []
        assert self.model.output is not None
        return [p for name, p in self.model.output.named_parameters() if name == "weight"]

    def whole_name(self, name: str) -> str:
        """What a parameter is called in the whole model."""
        return name if self.pipeline is None else self.pipeline.whole_name(name)

    def whole(self, name: str) -> Tensor:
        """The whole of a parameter of the whole model, on every rank; all ask for the same ones in the same order."""
        return whole(full_names(self.model)[name]) if self.pipeline is None else self.pipeline.whole(name)

    @cached_property
    def num_parameters(self) -> int:
        """Of the whole model."""
        copies = {id(parameter) for parameter in self._copies}
        count = sum(p.numel() for p in self.model.parameters() if id(p) not in copies)
        total = torch.tensor(count, dtype=torch.int64, device=self.mesh.world.device)
        if self.pipeline is not None:
            dist.all_reduce(total, group=self.pipeline.group)
        return int(total)

    def total(self, value: Tensor) -> Tensor:
        """The sum of a value over the ranks that read different rows or tokens, and over the stages, of which only the
        last has one that is not zero."""
        value = value.detach().clone()
        for axis in (*DATA_AXES, "pp"):
            group = self.mesh.group(axis)
            if group is not None:
                dist.all_reduce(value, group=group)
        return value
