"""How long pipeline stages stand idle: every schedule, measured, beside the formula and beside its order on paper.

    python benchmarks/pipeline_bubbles.py            2, 4 and 8 sleeping stages and 2 pinned ones; about two minutes
    python benchmarks/pipeline_bubbles.py --quick    2 sleeping stages, seconds

Sleeping stages need no free cores to speak of; the pinned ones compute, so two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from armillary.model.attend import plain
from armillary.parallel.apply import apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.pipeline import Passing, Pipeline, Rows
from armillary.parallel.pipeline_sleep import Work, idle_of_all, measured_idle, sleeping_pipeline
from armillary.parallel.pipeline_stage import hold
from armillary.parallel.schedule import idle_share
from armillary.parallel.schedule_replay import replayed_idle
from armillary.parallel.weights import fill_random, materialise
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.loss import loss_sum

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""schedule -> chunks a stage"""
SLEEP_S = 0.1
"""of a stage's forward pass and of either half of its backward pass"""
SEQUENCE, MICRO_BATCHES, STEPS = 128, 4, 8


def model() -> ModelConfig:
    """Eight equal layers and hardly a head, so that two stages take equally long."""
    return ModelConfig(name="even", hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=64, context=256,
                       layers=(LayerKind(),) * 8)  # fmt: skip


# --- as one of the ranks


def asleep(schedule: str, chunks: int, seconds: float) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    work = Work(forward_s=seconds, inputs_s=seconds, weights_s=seconds)
    pipeline = sleeping_pipeline(dist.group.WORLD, work, schedule=schedule, chunks=chunks)
    measured = measured_idle(pipeline, num_micro_batches=pipeline.size, steps=2)
    return {"measured": measured, "times": (1.0, 1.0, 1.0), "orders": gathered(pipeline.busy.order)}


def awake(schedule: str, chunks: int) -> dict[str, Any]:
    """A real model, each stage on a core of its own; formula and replay use the times its passes took."""
    with join_world("cpu") as world:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
        torch.set_num_threads(1)
        pipeline, passing, rows = real_stages(schedule, chunks, world)
        found = []
        for _ in range(STEPS):
            dist.barrier()
            pipeline.step(rows, passing, num_micro_batches=MICRO_BATCHES)
            found.append((idle_of_all(pipeline), stage_times(pipeline)))
            for parameter in pipeline.held.parameters():
                parameter.grad = None
        os.sched_setaffinity(0, cores)
    measured, times = sorted(found[1:])[len(found) // 2]
    return {"measured": measured, "times": times, "orders": gathered(pipeline.busy.order)}


def real_stages(schedule: str, chunks: int, world: Any) -> tuple[Pipeline, Passing, Rows]:
    layout = Layout(pp=world.size, schedule=schedule, interleave=chunks, precision="fp32")  # type: ignore[arg-type]
    mesh = make_mesh(layout, world)
    with torch.device("meta"):
        held = hold(model(), layout, mesh.rank("pp"), sequence=SEQUENCE)
    sharded = apply(held, layout, mesh, loss=loss_sum)
    materialise(held, "cpu")
    fill_random(held, seed=0)
    tokens = torch.randint(64, (MICRO_BATCHES * 2, SEQUENCE), generator=torch.Generator().manual_seed(0))
    rows = Rows(tokens_BT=tokens, positions_BT=torch.arange(SEQUENCE).expand_as(tokens), targets_BT=tokens,
                documents_BT=None)  # fmt: skip
    passing = Passing(attends=lambda _: plain, autocast=nullcontext, scale=lambda loss: loss,
                      loss=lambda chunk, hidden, y: sharded.loss_sum(hidden, y, model=chunk))  # fmt: skip
    assert sharded.pipeline is not None
    return sharded.pipeline, passing, rows


def stage_times(pipeline: Pipeline) -> tuple[float, float, float]:
    """(forward, inputs, weights) of a stage and micro-batch, the mean over stages; an undivided backward pass counts
    as two equal halves, which only the zero-bubble formula asks for."""
    seconds = pipeline.busy.seconds()
    whole = seconds.get("B", 0.0)
    mine = torch.tensor([seconds["F"], seconds.get("I", 0.0) + whole / 2, seconds.get("W", 0.0) + whole / 2])
    dist.all_reduce(mine, group=pipeline.group)
    forward, inputs, weights = (mine / (pipeline.size * MICRO_BATCHES)).tolist()
    return forward, inputs, weights


def gathered(order: list[Any]) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, order)
    return every


def be_a_rank(job: dict[str, Any]) -> None:
    with join_world("cpu") as world:
        found = [
            awake(name, chunks) if job["awake"] else asleep(name, chunks, job["seconds"])
            for name, chunks in SCHEDULES.items()
        ]
        if world.is_main:
            print(json.dumps(found))


# --- around them


def run(stages: int, **job: Any) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}", __file__]
    ran = subprocess.run([*line, "--rank", json.dumps(job)], env=environment, text=True, stdout=subprocess.PIPE,
                         check=True)  # fmt: skip
    return list(json.loads(ran.stdout.strip().splitlines()[-1]))


def show(what: str, stages: int, micro_batches: int, found: list[dict[str, Any]]) -> None:
    for (name, chunks), each in zip(SCHEDULES.items(), found, strict=True):
        forward, inputs, weights = each["times"]
        on_paper = replayed_idle(each["orders"], chunks=chunks, forward=forward, inputs=inputs, weights=weights)
        formula = idle_share(name, num_stages=stages, num_micro_batches=micro_batches, chunks=chunks, forward=forward,
                             backward=inputs + weights, weights=weights)  # fmt: skip
        cells = [f"{100 * value:.1f} %" for value in (formula, on_paper, each["measured"])]
        off = each["measured"] / formula - 1
        print(
            f"| {what} | {stages} | {micro_batches} | {name} | {' | '.join(cells)} | {100 * off:+.0f} % |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        be_a_rank(asked.rank)
        return
    print("| stages | number | micro-batches | schedule | formula | replayed | measured | off |")
    print("|---|--:|--:|---|--:|--:|--:|--:|")
    for stages in (2,) if asked.quick else (2, 4, 8):
        seconds = SLEEP_S / 5 if asked.quick else SLEEP_S
        show("sleeping", stages, stages, run(stages, awake=False, seconds=seconds))
    if not asked.quick:
        show("computing, pinned", 2, MICRO_BATCHES, run(2, awake=True))


if __name__ == "__main__":
    main()
