"""Pipeline schedules, those of torch.distributed.pipelining.

The planner has the bubble of each (planning/training), and spec.layout_rules what they cannot run.

GPipe (Huang et al., arXiv 1811.06965), 1F1B (Narayanan et al., arXiv 1806.03377), interleaved 1F1B (arXiv 2104.04473),
zero-bubble ZB-H1 (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

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
