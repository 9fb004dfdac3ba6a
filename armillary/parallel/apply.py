"""Applies a layout to a model, in one place and in a visible order.

Tensor and expert parallelism shard layers, recompute wraps them, compile sees both, offload takes the saved tensors,
and FSDP comes last. A pipeline stage is treated alike; FSDP shards its virtual stages one by one.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import FSDPModule

from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import full_names
from armillary.parallel import fsdp as data
from armillary.parallel import vocabulary
from armillary.parallel.collectives import Group, WaitTimer
from armillary.parallel.context.shard_sequence import Context, agree_on_length
from armillary.parallel.ddp import Replicas, sum_partial
from armillary.parallel.expert.shard_experts import apply_expert_parallel, fsdp_experts, is_of_expert
from armillary.parallel.grad_norm import clip
from armillary.parallel.local_tensors import local_shards_ready
from armillary.parallel.mesh import DATA_AXES, Mesh
from armillary.parallel.offload import Activations, offload_activations
from armillary.parallel.pipeline.pipeline import make_pipeline
from armillary.parallel.pipeline.stage import StageModel, VirtualStage
from armillary.parallel.recompute import recompute, recomputed_blocks
from armillary.parallel.shard_weights import full_tensor
from armillary.parallel.tensor import apply_tensor_parallel, refuse_uneven
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout

LossSum = Callable[..., Tensor]
"""loss_sum(model, hidden, targets, chunk=…) of a model with an unsharded head"""


def apply(
    model: Transformer, layout: Layout, mesh: Mesh, *, loss: LossSum | None = None, compile: bool = False
) -> Sharded:
    """Shard a model, on meta or with weights, over the mesh. `loss` is used where the vocabulary is not sharded."""
    check_layout(layout, model.config, num_devices=mesh.world.size, by_trainer=True, compiled=compile)
    assert (layout.pp > 1) == isinstance(model, StageModel), "stages are built by make_stage_model"
    tp = shard_tokens = None
    if layout.tp > 1:
        shard_tokens = layout.sequence_parallel
        recomputed = recomputed_blocks(model, kind=layout.recompute, interval=layout.recompute_every)
        saved = set(model.blocks) - set(recomputed)
        tp = apply_tensor_parallel(model, mesh.along("tp"), shard_tokens=shard_tokens, regather=saved)
    ep = apply_expert_parallel(model, mesh)
    recompute(model, kind=layout.recompute, interval=layout.recompute_every)
    if compile:
        compile_blocks(model, tp, overlap=bool(shard_tokens) and can_fold(mesh))
    offloads = layout.offload in ("activations", "both")
    activations = offload_activations(model, mesh.world.device) if offloads else None
    chunks = [VirtualStage(model, span) for span in model.spans] if isinstance(model, StageModel) else [model]
    if layout.zero and mesh.num_copies > 1:
        axes = [axis for axis in DATA_AXES if mesh.size(axis) > 1 or axis == "shard"]
        for chunk in chunks:
            policy, selective = data.policy_of(layout.precision), layout.recompute == "selective"
            fsdp_experts(chunk, mesh, policy, reshard=layout.zero == 3, recomputed=selective)
            data.apply_fsdp(chunk, mesh.along(*axes), zero=layout.zero, precision=layout.precision)
    return Sharded(
        model,
        layout,
        mesh,
        chunks=chunks,
        tp=tp,
        ep=ep,
        shard_tokens=bool(shard_tokens),
        loss=loss,
        activations=activations,
    )


class Sharded:
    """A model sharded over a mesh, with what a training step needs of it."""

    def __init__(
        self,
        model: Transformer,
        layout: Layout,
        mesh: Mesh,
        *,
        chunks: list[Any],
        tp: Group | None,
        ep: Group | None,
        shard_tokens: bool,
        loss: LossSum | None,
        activations: Activations | None = None,
    ) -> None:
        self.model, self.layout, self.mesh, self._chunks = model, layout, mesh, chunks
        self._tp, self._ep, self._shard_tokens, self._loss = tp, ep, shard_tokens, loss
        self.context = None if mesh.context is None else Context.of(mesh.context)
        """how rows are sharded over the context-parallel ranks; None where they are not"""
        if self.context is not None:
            agree_on_length(model, self.context)
        self.pipeline = make_pipeline(model, chunks, layout, mesh) if isinstance(model, StageModel) else None
        """runs micro-batches through the stages; None without pipeline parallelism"""
        self.activations = activations
        """those that are offloaded to host memory; None where they stay"""
        if tp is not None and shard_tokens and model.embedding is not None:
            chunks[0].register_forward_pre_hook(lambda _, args: refuse_uneven(args[0].shape[1], tp.size))

    @property
    def is_fsdp(self) -> bool:
        """Weights are sharded between steps, and are cast as they are all-gathered: no autocast is needed."""
        return isinstance(self._chunks[0], FSDPModule)

    def add_timer(self, timer: WaitTimer) -> None:
        """`timer` times every collective of tensor and expert parallelism from now on."""
        for group in (self._tp, self._ep):
            if group is not None:
                group.timers.append(timer)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward pass; gradients are reduced over ranks after the last."""
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
        """Groups that reduce gradients: all replicas, but for experts only the ranks with the same ones. Built on first
        use, because filling a model from meta creates new parameters."""
        if self.is_fsdp:
            return []
        experts, dense = ([p for p in self.model.parameters() if is_of_expert(p) is wanted] for wanted in (True, False))
        by_group = {self.mesh.group("replicate"): dense, self.mesh.group("expert_replicate"): experts}
        return [
            Replicas(parameters, group, bucket_bytes=self.layout.bucket_bytes)
            for group, parameters in by_group.items()
            if group is not None
        ]

    def finish_gradients(self) -> None:
        """Reduce over ranks the partial sums that the backward passes of a step left."""
        for replicas in self._replicas:
            replicas.finish()
        group = self.mesh.group("tp")
        if group is not None and not self.is_fsdp:
            sum_partial(self.model.parameters(), group)
        if self.pipeline is not None:
            self.pipeline.sum_tied()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward passes without backward passes and without dropout; weights that were all-gathered are resharded
        afterwards."""
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
        """Sum of the losses of this rank's rows, the same on all tensor-parallel ranks; `model` is the virtual stage
        with the head, with pipeline parallelism."""
        model = model or self.model
        if self._tp is not None:
            return vocabulary.loss_sum(
                model, hidden, targets_BT, chunk=chunk, group=self._tp, shard_tokens=self._shard_tokens
            )
        assert self._loss is not None, "apply was given a loss for unsharded heads"
        return self._loss(model, hidden, targets_BT, chunk=chunk)

    def clip(self, limit: float) -> Tensor:
        """The gradient norm over the full mesh before clipping to `limit`; 0 only measures."""
        return clip(self.model.parameters(), self.mesh, limit, copies=self._copies)

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm over all stages, from the norm of this stage."""
        if self.pipeline is None:
            return norm
        copied = [p.grad.norm() for p in self._copies if p.grad is not None]
        squares = norm.square() - sum(each.square() for each in copied)
        dist.all_reduce(squares, group=self.pipeline.group)
        return squares.sqrt()

    @property
    def _copies(self) -> list[Tensor]:
        """Parameters that another stage has too, and counts."""
        if not isinstance(self.model, StageModel) or not self.model.has_copy:
            return []
        assert self.model.output is not None
        return [p for name, p in self.model.output.named_parameters() if name == "weight"]

    def full_name(self, name: str) -> str:
        """A parameter's name in the full model."""
        return name if self.pipeline is None else self.pipeline.full_name(name)

    def full_tensor(self, name: str) -> Tensor:
        """A parameter of the full model, unsharded and on every rank; all ranks call it in the same order."""
        return full_tensor(full_names(self.model)[name]) if self.pipeline is None else self.pipeline.full_tensor(name)

    @cached_property
    def num_parameters(self) -> int:
        """Of the full model."""
        copies = {id(parameter) for parameter in self._copies}
        count = sum(p.numel() for p in self.model.parameters() if id(p) not in copies)
        total = torch.tensor(count, dtype=torch.int64, device=self.mesh.world.device)
        if self.pipeline is not None:
            dist.all_reduce(total, group=self.pipeline.group)
        return int(total)

    def total(self, value: Tensor) -> Tensor:
        """The sum of a value over the ranks that read different rows or tokens, and over the stages, of which only the
        last has a non-zero value."""
        value = value.detach().clone()
        for axis in (*DATA_AXES, "pp"):
            group = self.mesh.group(axis)
            if group is not None:
                dist.all_reduce(value, group=group)
        return value


def compile_blocks(model: Transformer, tp: Group | None = None, *, overlap: bool = False) -> None:
    """Compile every block's forward; with `overlap`, tensor-parallel collectives are pipelined with the GEMMs."""
    if tp is not None and overlap:
        _pipeline_collectives(tp)
    for block in model.blocks.values():
        compiled = torch.compile(block.forward)
        block.forward = compiled if tp is None else partial(_with_local_shards, block, compiled)


def can_fold(mesh: Mesh) -> bool:
    """Whether tensor-parallel ranks share memory: GPUs of one machine that reach each other."""
    if mesh.world.device.type != "cuda" or not mesh.is_on_one_machine("tp"):
        return False
    peers = range(1, torch.cuda.device_count())
    return len(peers) > 0 and all(torch.cuda.can_device_access_peer(0, other) for other in peers)


def _pipeline_collectives(tp: Group) -> None:
    """torch's asynchronous tensor parallelism: GEMMs are split along with the all-gathers and reduce-scatters next to
    them, over memory that the ranks of one machine share."""
    config: Any = importlib.import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # called needless by its deprecation, while the compiler still asks whether it was called (2.11 to 2.13)
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp.name)


def _with_local_shards(block: nn.Module, compiled: Callable[..., Tensor], *args: Any) -> Tensor:
    with local_shards_ready(block):
        return compiled(*args)
