"""A pipeline from its parts, and what cannot be one."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from armillary.errors import BadLayout
from armillary.parallel.data import HALF
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline import Pipeline
from armillary.parallel.pipeline_stage import Chunk, Held
from armillary.parallel.schedule import rounds_fit
from armillary.spec.layout import Layout


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
    if held.stream is not None:
        return held.stream
    half = HALF.get(layout.precision) if isinstance(chunk, FSDPModule) else None
    return half or next(held.parameters()).dtype


def refuse_split(layout: Layout, *, compile: bool) -> None:
    """torch splits a backward pass along the graph of eager operators, and runs both halves through it."""
    if layout.pp == 1 or layout.schedule != "zero_bubble":
        return
    if compile:
        raise BadLayout("zero-bubble stages cannot be compiled; try --set layout.schedule=1f1b, or "
                        "--set train.compile=false")  # fmt: skip
    if layout.recompute == "selective":
        raise BadLayout("zero-bubble stages cannot recompute selectively; try --set layout.recompute=full, or "
                        "--set layout.schedule=1f1b")  # fmt: skip


def refuse_rounds(layout: Layout, batch_tokens: int, sequence: int) -> None:
    """Micro-batches of a step that the schedule cannot take in equal rounds."""
    count = layout.num_micro_batches(batch_tokens, sequence)
    if layout.pp == 1 or count < 1 or rounds_fit(layout.schedule, layout.pp, count):
        return
    near = next(n for n in range(count - 1, 0, -1) if rounds_fit(layout.schedule, layout.pp, n))
    tokens = near * batch_tokens // count
    raise BadLayout(f"schedule={layout.schedule} takes {count} micro-batches in rounds of about pp={layout.pp}, which "
                    f"do not come out even; try --set train.batch_tokens={tokens}")  # fmt: skip
