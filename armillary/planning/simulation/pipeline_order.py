"""The order of passes in a training step's pipeline: which micro-batch each stage computes when.

The orders are those of torch.distributed.pipelining, which runs them (parallel/pipeline); a test compares all of them.
GPipe: Huang et al., arXiv 1811.06965. 1F1B: Narayanan et al., arXiv 1806.03377. Interleaved: arXiv 2104.04473.
Zero-bubble ZB-H1: Qi et al., arXiv 2401.10241.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

PassKind = Literal["F", "B", "I", "W"]
"""forward, backward; where a schedule splits the latter: gradients of inputs, gradients of weights"""


class Pass(NamedTuple):
    """One pass of a micro-batch through a chunk of layers; chunk c is on stage c mod stages."""

    kind: PassKind
    chunk: int
    batch: int


def pipeline_order(schedule: str, stages: int, chunks: int, batches: int) -> list[list[Pass]]:
    """The passes of every stage, in their order; `chunks` per stage, `batches` micro-batches."""
    if schedule == "gpipe" or (schedule == "1f1b" and batches < stages):
        return [_gpipe(stage, batches) for stage in range(stages)]
    if schedule == "1f1b":
        return [_alternating(stage, stages, 1, batches, stages - stage - 1, batches) for stage in range(stages)]
    rounds = max(1, batches // stages)
    per_round = batches // rounds
    split = schedule == "zero_bubble"
    by_stage = []
    for stage in range(stages):
        warm_up = (chunks - 1) * per_round + (1 if split else 2) * (stages - 1 - stage)
        warm_up = min(warm_up, batches * chunks)
        by_stage.append(_alternating(stage, stages, chunks, batches, warm_up, per_round, split=split))
    return by_stage


def _gpipe(stage: int, batches: int) -> list[Pass]:
    kinds: tuple[PassKind, ...] = ("F", "B")
    return [Pass(kind, stage, batch) for kind in kinds for batch in range(batches)]


def _alternating(
    stage: int, stages: int, chunks: int, batches: int, warm_up: int, per_round: int, *, split: bool = False
) -> list[Pass]:
    """`warm_up` forward passes, then one forward and one backward in turn, then the rest. Chunks take turns after
    `per_round` micro-batches each. Gradients of weights are `stage` backward passes late where the schedule splits."""
    total = batches * chunks
    forward = [_nth(n, stage, stages, chunks, per_round, backward=False) for n in range(total)]
    backward = [_nth(n, stage, stages, chunks, per_round, backward=True) for n in range(total)]
    order = [Pass("F", *forward[n]) for n in range(warm_up)]
    for n in range(total):
        if warm_up + n < total:
            order.append(Pass("F", *forward[warm_up + n]))
        order.append(Pass("I" if split else "B", *backward[n]))
        if split and n >= stage:
            order.append(Pass("W", *backward[n - stage]))
    deferred = range(max(0, total - stage), total) if split else ()
    return order + [Pass("W", *backward[n]) for n in deferred]


def _nth(n: int, stage: int, stages: int, chunks: int, per_round: int, *, backward: bool) -> tuple[int, int]:
    """(chunk, micro-batch) of a stage's n-th forward or backward pass."""
    cycle, within = divmod(n, per_round)
    local = cycle % chunks
    return (chunks - 1 - local if backward else local) * stages + stage, cycle // chunks * per_round + within
