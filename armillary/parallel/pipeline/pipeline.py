"""Pipeline parallelism: micro-batches pass through the stages of a model, forward and backward, in a schedule's order.

Every stage reads the same rows: the first stage the tokens, the last the targets, and all of them positions and
documents. Hidden states and their gradients are sent from rank to rank.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from armillary.model.weights.hf_weights import full_names
from armillary.parallel.ddp import local_of
from armillary.parallel.fsdp import HALF
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.stage import COPY, TIED, Attends, StageModel, VirtualStage
from armillary.parallel.shard_weights import full_tensor
from armillary.parallel.timers import StageTimer
from armillary.spec.layout import Layout

# GPipe (Huang et al., arXiv 1811.06965), 1F1B (Narayanan et al., arXiv 1806.03377), interleaved 1F1B (arXiv
# 2104.04473), zero-bubble ZB-H1 (Qi et al., arXiv 2401.10241); the planner has the bubble of each
_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


def make_schedule(
    name: str, stages: list[PipelineStage], num_micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Gradients are summed, not averaged: the loss is divided by the number of targets of the step."""
    settings: dict[str, Any] = {"n_microbatches": num_micro_batches, "loss_fn": loss, "scale_grads": False}
    if name == "1f1b" and num_micro_batches < stages[0].num_stages:
        name = "gpipe"  # the same order, where the pipeline is never full; torch refuses to call it 1F1B
    if name in _SINGLE:
        (stage,) = stages
        return _SINGLE[name](stage, **settings)
    return _SEVERAL[name](stages, **settings)


Loss = Callable[[VirtualStage, Tensor, Tensor], Tensor]
"""loss(last virtual stage, hidden, targets) of a micro-batch, already divided by the number of targets"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The input of the stages for a step, or for a micro-batch: this rank's tokens, and the documents of full rows."""

    tokens_BT: Tensor
    positions_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None  # None where every row is one document

    def stage_inputs(self) -> dict[str, Tensor]:
        """What every stage reads beside hidden states."""
        documents = {} if self.documents_BT is None else {"documents_BT": self.documents_BT}
        return {"positions_BT": self.positions_BT, **documents}


@dataclass(frozen=True, kw_only=True)
class StageFns:
    """The functions with which stages run the micro-batches of a step."""

    attends: Attends  # the attention of a micro-batch, from its documents
    loss: Loss  # on the last stage
    autocast: Callable[[], AbstractContextManager[Any]]  # around every forward pass and the loss
    scale: Callable[[Tensor], Tensor]  # of the loss before its backward pass


class Pipeline:
    """The stage of this rank: its virtual stages, and its place among the other ranks."""

    def __init__(
        self,
        model: StageModel,
        virtual_stages: list[VirtualStage],
        group: dist.ProcessGroup,
        *,
        schedule: str,
        device: torch.device,
        shard_tokens: int = 1,
    ) -> None:
        """`shard_tokens`: number of shards of hidden states along their tokens (sequence parallelism)."""
        self.model, self.virtual_stages, self.group, self.schedule = model, virtual_stages, group, schedule
        self.rank, self.size, self.device = group.rank(), group.size(), device
        self._stage_fns: StageFns | None = None
        self.timer = StageTimer(device)
        self._shard_tokens = shard_tokens
        self._losses: list[Tensor] = []
        self._built: tuple[tuple[object, ...], Any] | None = None

    # --- a step

    def step(self, rows: Rows, stage_fns: StageFns, *, num_micro_batches: int) -> Tensor:
        """Forward and backward passes of all micro-batches; returns the sum of their losses, zero on all stages but the
        last. Gradients are accumulated over micro-batches, and with FSDP reduced over its ranks."""
        self._enter(stage_fns)
        first = (rows.tokens_BT,) if self.virtual_stages[0].span.first else ()
        last = {"target": rows.targets_BT} if self.virtual_stages[-1].span.last else {}
        run = self._schedule(rows, num_micro_batches)
        quiet = {"return_outputs": False} if "return_outputs" in inspect.signature(run.step).parameters else {}
        self.timer.begin()
        run.step(*first, **last, **quiet, **rows.stage_inputs())
        self.timer.end()
        return self._total()

    def _enter(self, stage_fns: StageFns) -> None:
        self._stage_fns, self._losses = stage_fns, []
        for chunk in self.virtual_stages:
            chunk.attends, chunk.autocast = stage_fns.attends, stage_fns.autocast

    def _total(self) -> Tensor:
        wide = torch.promote_types(self.virtual_stages[0].wire, torch.float32)
        return sum((loss.detach() for loss in self._losses), torch.zeros((), dtype=wide, device=self.device))

    def _loss(self, hidden: Tensor, targets_BT: Tensor) -> Tensor:
        assert self._stage_fns is not None
        with self._stage_fns.autocast():
            loss = self._stage_fns.loss(self.virtual_stages[-1], hidden, targets_BT)
        self._losses.append(loss)
        return self._stage_fns.scale(loss)

    def _schedule(self, rows: Rows, num_micro_batches: int) -> Any:
        """Built for the shapes of the first step, and again when they change."""
        shape = (rows.tokens_BT.shape[0] // num_micro_batches, rows.tokens_BT.shape[1])
        key = (num_micro_batches, shape)
        if self._built is None or self._built[0] != key:
            total = self.size * len(self.virtual_stages)
            stages = [self._stage(chunk, shape, total) for chunk in self.virtual_stages]
            loss = self.timer.during(self._loss)
            self._built = key, make_schedule(self.schedule, stages, num_micro_batches, loss)
        return self._built[1]

    def _stage(self, chunk: VirtualStage, shape: tuple[int, int], num_chunks: int) -> PipelineStage:
        hidden = torch.empty(self._hidden_shape(shape), dtype=chunk.wire, device="meta", requires_grad=True)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        stage = PipelineStage(
            chunk,
            chunk.span.index,
            num_chunks,
            self.device,
            group=self.group,
            input_args=(tokens if chunk.span.first else hidden,),
            output_args=(hidden,),
        )
        return self.timer.watch(stage)

    def _hidden_shape(self, shape: tuple[int, int]) -> tuple[int, int, int]:
        return shape[0], shape[1] // self._shard_tokens, self.model.config.hidden

    # --- forward only

    def evaluate(self, rows: Rows, stage_fns: StageFns) -> Tensor:
        """The loss of one micro-batch without a backward pass; zero on all stages but the last."""
        self._enter(stage_fns)
        for chunk in self.virtual_stages:
            span, peer_before, peer_after = chunk.span, self._peer(-1), self._peer(+1)
            x = rows.tokens_BT
            if not span.first:
                shape = self._hidden_shape((rows.tokens_BT.shape[0], rows.tokens_BT.shape[1]))
                x = torch.empty(shape, dtype=chunk.wire, device=self.device)
                dist.recv(x, peer_before, group=self.group)
            hidden = chunk(x, **rows.stage_inputs())
            if span.last:
                self._loss(hidden, rows.targets_BT)
            else:
                dist.send(hidden.contiguous(), peer_after, group=self.group)
        return self._total()

    def _peer(self, step: int) -> int:
        return dist.get_global_rank(self.group, (self.rank + step) % self.size)

    # --- parameters of all stages

    @torch.no_grad()
    def sum_tied(self) -> None:
        """The tied embedding and its copy on the last stage get the sum of both gradients, so that they stay equal."""
        if not self.model.config.tied or self.rank not in (0, self.size - 1):
            return
        parameter = full_names(self.model)[TIED]
        if parameter.grad is None:
            return
        local = local_of(parameter.grad).contiguous()
        remote, peer = torch.empty_like(local), self._peer(-1 if self.rank == 0 else +1)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, local, peer, self.group), dist.P2POp(dist.irecv, remote, peer, self.group)]
        )
        for work in works:
            work.wait()
        local_of(parameter.grad).copy_(local + remote if self.rank == 0 else remote + local)

    def full_name(self, name: str) -> str:
        """A parameter's name in the full model: the copy of a tied embedding is that embedding."""
        return TIED if self.model.has_copy and name == COPY else name

    @torch.no_grad()
    def full_tensor(self, name: str) -> Tensor:
        """A parameter of any stage, unsharded and on every rank; all ranks call it for the same names in order."""
        parameters = full_names(self.model)
        tensor = full_tensor(parameters[name]).contiguous() if name in parameters else None
        about = [None if tensor is None else (tuple(tensor.shape), tensor.dtype)] * self.size
        dist.all_gather_object(about, about[0], group=self.group)
        owner = next(rank for rank, shape in enumerate(about) if shape is not None)
        if tensor is None:
            shape, dtype = about[owner]  # type: ignore[misc]
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(tensor, dist.get_global_rank(self.group, owner), group=self.group)
        return tensor


# --- construction


def make_pipeline(model: StageModel, chunks: list[VirtualStage], layout: Layout, mesh: Mesh) -> Pipeline:
    """This rank's stage, with the dtype of hidden states between stages set."""
    group = mesh.group("pp")
    assert group is not None
    for chunk in chunks:
        chunk.wire = _wire(model, chunk, layout)
    shards = layout.tp if layout.sequence_parallel else 1
    return Pipeline(model, chunks, group, schedule=layout.schedule, device=mesh.world.device, shard_tokens=shards)


def _wire(model: StageModel, chunk: VirtualStage, layout: Layout) -> torch.dtype:
    """The dtype of hidden states between stages: that of the residual stream, where autocast leaves it alone."""
    if model.residual_dtype is not None:
        return model.residual_dtype
    half = HALF.get(layout.precision) if isinstance(chunk, FSDPModule) else None
    return half or next(model.parameters()).dtype
