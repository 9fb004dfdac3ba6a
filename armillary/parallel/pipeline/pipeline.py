"""Pipeline parallelism: micro-batches go through the stages of a model, forward and back, in a schedule's order.

Every stage reads the same rows: the first their tokens, the last their targets, and all their positions and documents.
Hidden states and their gradients travel from rank to rank; losses, norms and whole tensors are told to all stages.
"""

from __future__ import annotations

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

from armillary.model.weights.hf_weights import full_names
from armillary.parallel.ddp import local_of
from armillary.parallel.fsdp import HALF
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.schedule import make_schedule
from armillary.parallel.pipeline.stage import COPY, TIED, Attends, Chunk, Held
from armillary.parallel.pipeline.stage_timer import StageTimer, timed
from armillary.parallel.shard_weights import whole
from armillary.spec.layout import Layout

Loss = Callable[[Chunk, Tensor, Tensor], Tensor]
"""loss(last chunk, hidden, targets) of a micro-batch, already divided"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What the stages read of a step, or of a micro-batch."""

    tokens_BT: Tensor
    """this rank's tokens"""
    positions_BT: Tensor
    """of these tokens"""
    targets_BT: Tensor
    """of these tokens"""
    documents_BT: Tensor | None
    """of whole rows; None where every row is one"""

    def along(self) -> dict[str, Tensor]:
        """What every stage needs beside hidden states."""
        more = {} if self.documents_BT is None else {"documents_BT": self.documents_BT}
        return {"positions_BT": self.positions_BT, **more}


@dataclass(frozen=True, kw_only=True)
class Passing:
    """How micro-batches pass through the stages of a step."""

    attends: Attends
    """how a micro-batch attends, from its documents"""
    loss: Loss
    """on the last stage"""
    autocast: Callable[[], AbstractContextManager[Any]]
    """around every forward pass and the loss"""
    scale: Callable[[Tensor], Tensor]
    """of the loss before its backward pass"""


class Pipeline:
    """The stage of this rank: its chunks, and its place among the stages."""

    def __init__(
        self,
        held: Held,
        chunks: list[Chunk],
        group: dist.ProcessGroup,
        *,
        schedule: str,
        device: torch.device,
        cut_tokens: int = 1,
    ) -> None:
        """`cut_tokens`: into how many pieces hidden states are cut along their tokens (sequence parallelism)."""
        self.held, self.chunks, self.group, self.schedule = held, chunks, group, schedule
        self.rank, self.size, self.device = group.rank(), group.size(), device
        self._passing: Passing | None = None
        self.timer = StageTimer(device)
        self._cut_tokens = cut_tokens
        self._losses: list[Tensor] = []
        self._made: tuple[tuple[object, ...], Any] | None = None

    # --- a step

    def step(self, rows: Rows, passing: Passing, *, num_micro_batches: int) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses, which is zero on all stages but the last.
        Gradients are summed over micro-batches, under FSDP over its ranks too."""
        self._enter(passing)
        first = (rows.tokens_BT,) if self.chunks[0].span.first else ()
        last = {"target": rows.targets_BT} if self.chunks[-1].span.last else {}
        run = self._schedule(rows, num_micro_batches)
        quiet = {"return_outputs": False} if "return_outputs" in inspect.signature(run.step).parameters else {}
        self.timer.begin()
        run.step(*first, **last, **quiet, **rows.along())
        self.timer.end()
        return self._total()

    def _enter(self, passing: Passing) -> None:
        self._passing, self._losses = passing, []
        for chunk in self.chunks:
            chunk.attends, chunk.autocast = passing.attends, passing.autocast

    def _total(self) -> Tensor:
        wide = torch.promote_types(self.chunks[0].wire, torch.float32)
        return sum((loss.detach() for loss in self._losses), torch.zeros((), dtype=wide, device=self.device))

    def _loss(self, hidden: Tensor, targets_BT: Tensor) -> Tensor:
        assert self._passing is not None
        with self._passing.autocast():
            loss = self._passing.loss(self.chunks[-1], hidden, targets_BT)
        self._losses.append(loss)
        return self._passing.scale(loss)

    def _schedule(self, rows: Rows, num_micro_batches: int) -> Any:
        """Made when shapes are first seen, and kept while they stay."""
        shape = (rows.tokens_BT.shape[0] // num_micro_batches, rows.tokens_BT.shape[1])
        key = (num_micro_batches, shape)
        if self._made is None or self._made[0] != key:
            total = self.size * len(self.chunks)
            stages = [self._stage(chunk, shape, total) for chunk in self.chunks]
            loss = self.timer.during(self._loss)
            self._made = key, make_schedule(self.schedule, stages, num_micro_batches, loss)
        return self._made[1]

    def _stage(self, chunk: Chunk, shape: tuple[int, int], num_chunks: int) -> PipelineStage:
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
        return timed(stage, self.timer)

    def _hidden_shape(self, shape: tuple[int, int]) -> tuple[int, int, int]:
        return shape[0], shape[1] // self._cut_tokens, self.held.config.hidden

    # --- forward only

    def evaluate(self, rows: Rows, passing: Passing) -> Tensor:
        """The loss of one micro-batch without a backward pass; zero on all stages but the last."""
        self._enter(passing)
        for chunk in self.chunks:
            span, peer_before, peer_after = chunk.span, self._peer(-1), self._peer(+1)
            x = rows.tokens_BT
            if not span.first:
                shape = self._hidden_shape((rows.tokens_BT.shape[0], rows.tokens_BT.shape[1]))
                x = torch.empty(shape, dtype=chunk.wire, device=self.device)
                dist.recv(x, peer_before, group=self.group)
            made = chunk(x, **rows.along())
            if span.last:
                self._loss(made, rows.targets_BT)
            else:
                dist.send(made.contiguous(), peer_after, group=self.group)
        return self._total()

    def _peer(self, step: int) -> int:
        return dist.get_global_rank(self.group, (self.rank + step) % self.size)

    # --- what all stages know together

    @torch.no_grad()
    def sum_tied(self) -> None:
        """The embedding and its copy at the other end get the sum of both gradients, so they stay equal."""
        if not self.held.config.tied or self.rank not in (0, self.size - 1):
            return
        parameter = full_names(self.held)[TIED]
        if parameter.grad is None:
            return
        ours = local_of(parameter.grad).contiguous()
        theirs, peer = torch.empty_like(ours), self._peer(-1 if self.rank == 0 else +1)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, ours, peer, self.group), dist.P2POp(dist.irecv, theirs, peer, self.group)]
        )
        for work in works:
            work.wait()
        local_of(parameter.grad).copy_(ours + theirs if self.rank == 0 else theirs + ours)

    def whole_name(self, name: str) -> str:
        """A parameter's name in the whole model: the copy of a tied embedding is that embedding."""
        return TIED if self.held.has_copy and name == COPY else name

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """The whole of a parameter that any stage holds, on every rank; all ranks ask for the same ones in order."""
        parameters = full_names(self.held)
        mine = whole(parameters[name]).contiguous() if name in parameters else None
        about = [None if mine is None else (tuple(mine.shape), mine.dtype)] * self.size
        dist.all_gather_object(about, about[0], group=self.group)
        owner = next(rank for rank, found in enumerate(about) if found is not None)
        if mine is None:
            shape, dtype = about[owner]  # type: ignore[misc]
            mine = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(mine, dist.get_global_rank(self.group, owner), group=self.group)
        return mine


# --- from its parts


def make_pipeline(held: Held, chunks: list[Chunk], layout: Layout, mesh: Mesh) -> Pipeline:
    """This rank's stage, ready to pass micro-batches on."""
    group = mesh.group("pp")
    assert group is not None
    for chunk in chunks:
        chunk.wire = _wire(held, chunk, layout)
    cut = layout.tp if layout.sequence_parallel else 1
    return Pipeline(held, chunks, group, schedule=layout.schedule, device=mesh.world.device, cut_tokens=cut)


def _wire(held: Held, chunk: Chunk, layout: Layout) -> torch.dtype:
    """The format of hidden states between stages: that of the residual stream, where autocast leaves it alone."""
    if held.residual_dtype is not None:
        return held.residual_dtype
    half = HALF.get(layout.precision) if isinstance(chunk, FSDPModule) else None
    return half or next(held.parameters()).dtype
