"""How long pipeline stages stand idle: every schedule, measured, beside the formula and beside its order on paper.

    python -m benchmarks.pipeline_bubbles                    2, 4 and 8 sleeping stages, 2 pinned ones; 3 to 4 minutes
    python -m benchmarks.pipeline_bubbles --only computing   the pinned ones, 2 minutes; --only sleeping: the others
    python -m benchmarks.pipeline_bubbles --quick            2 sleeping stages, seconds

Sleeping stages need no free cores to speak of; the pinned ones compute, each on a core of its own, so two quiet cores.
Formula and replay take the times that the passes of that very step took: the formula their mean over the stages, the
replay each stage's own. Of the quicker half of the steps, which other work disturbed least, the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from armillary.model.layers.attention_forms import plain
from armillary.parallel.apply import apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.pipeline.pipeline import Pipeline, Rows, StageFns
from armillary.parallel.pipeline.stage import make_stage_model
from armillary.parallel.shard_weights import fill_random, materialise
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.step.loss import loss_sum
from tests.parallel.pipeline.idle_stages import (
    Work,
    idle_of_all,
    idle_share,
    measured_idle,
    replayed_idle,
    sleeping_pipeline,
)

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""schedule -> chunks a stage"""
SLEEP_S = 0.1
"""of a stage's forward pass and of either half of its backward pass"""
SEQUENCE, ROWS, MICRO_BATCHES, STEPS = 256, 2, 2, 9
"""of a computing stage; a forward pass takes a few tenths of a second, an exchange of 1 MB one or two thousandths"""


def model() -> ModelConfig:
    """Eight equal layers and hardly a head, so that two stages take equally long; wide, so that products are most of
    the work and both halves of a backward pass take about as long as a forward pass."""
    return ModelConfig(
        name="even",
        hidden=512,
        heads=4,
        kv_heads=4,
        head_dim=128,
        ffn=2048,
        vocab=64,
        context=256,
        layers=(LayerKind(),) * 8,
    )


# --- as one of the ranks


def asleep(schedule: str, chunks: int, seconds: float) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    work = Work(forward_s=seconds, inputs_s=seconds, weights_s=seconds)
    pipeline = sleeping_pipeline(dist.group.WORLD, work, schedule=schedule, chunks=chunks)
    measured = measured_idle(pipeline, num_micro_batches=pipeline.size, steps=2)
    return {"measured": measured, "works": [[seconds] * 3] * pipeline.size, "orders": gathered(pipeline.timer.order)}


def awake(schedule: str, chunks: int, world: Any) -> dict[str, Any]:
    """A real model; the median of the quicker half of all steps but the first, which makes connections."""
    pipeline, stage_fns, rows = real_stages(schedule, chunks, world)
    found = []
    for _ in range(STEPS):
        dist.barrier()
        pipeline.step(rows, stage_fns, num_micro_batches=MICRO_BATCHES)
        longest = max(gathered(pipeline.timer.take()[1]))
        found.append((idle_of_all(pipeline), longest, gathered(stage_times(pipeline))))
        for parameter in pipeline.model.parameters():
            parameter.grad = None
    quick = sorted(found[1:], key=lambda step: step[1])[: len(found) // 2]
    measured, seconds, works = sorted(quick)[len(quick) // 2]
    return {
        "measured": measured,
        "works": works,
        "seconds": seconds,
        "orders": gathered(pipeline.timer.order),
        "all": [round(share, 4) for share, _, _ in found],
    }


def real_stages(schedule: str, chunks: int, world: Any) -> tuple[Pipeline, StageFns, Rows]:
    layout = Layout(pp=world.size, schedule=schedule, interleave=chunks, precision="fp32")  # type: ignore[arg-type]
    mesh = make_mesh(layout, world)
    with torch.device("meta"):
        held = make_stage_model(model(), layout, mesh.rank("pp"), sequence=SEQUENCE)
    sharded = apply(held, layout, mesh, loss=loss_sum)
    materialise(held, "cpu")
    fill_random(held, seed=0)
    tokens = torch.randint(64, (MICRO_BATCHES * ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))
    rows = Rows(
        tokens_BT=tokens, positions_BT=torch.arange(SEQUENCE).expand_as(tokens), targets_BT=tokens, documents_BT=None
    )
    stage_fns = StageFns(
        attends=lambda _: plain,
        autocast=nullcontext,
        scale=lambda loss: loss,
        loss=lambda chunk, hidden, y: sharded.loss_sum(hidden, y, model=chunk),
    )
    assert sharded.pipeline is not None
    return sharded.pipeline, stage_fns, rows


def stage_times(pipeline: Pipeline) -> list[float]:
    """[forward, inputs, weights] of this stage and a micro-batch; an undivided backward pass counts as two equal
    halves, which only the zero-bubble formula asks for."""
    seconds = pipeline.timer.seconds()
    whole = seconds.get("B", 0.0)
    halves = [seconds.get("I", 0.0) + whole / 2, seconds.get("W", 0.0) + whole / 2]
    return [each / MICRO_BATCHES for each in (seconds["F"], *halves)]


def gathered(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def be_a_rank(job: dict[str, Any]) -> None:
    if job["awake"]:  # before any thread is started, so that all of a stage's threads stay on its core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
        torch.set_num_threads(1)
    with join_world("cpu") as world:
        for name, chunks in SCHEDULES.items():
            found = awake(name, chunks, world) if job["awake"] else asleep(name, chunks, job["seconds"])
            if world.is_main:
                print(json.dumps(found), flush=True)


# --- around them


def run(stages: int, **job: Any) -> Iterator[dict[str, Any]]:
    """What every schedule gave, as it ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}"]
    ranks = subprocess.Popen(
        [*line, "-m", "benchmarks.pipeline_bubbles", "--rank", json.dumps(job)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    )
    with ranks:
        assert ranks.stdout is not None
        yield from map(json.loads, ranks.stdout)
    if ranks.returncode:
        raise SystemExit(ranks.returncode)


def mean_of(works: list[Work]) -> Work:
    """The first stage has nobody to send gradients to, so torch makes both halves of its backward pass at once: how
    long each half takes is seen on the others."""
    forward = sum(work.forward_s for work in works) / len(works)
    backward = sum(work.turn_s for work in works) / len(works) - forward
    inputs, weights = sum(work.inputs_s for work in works[1:]), sum(work.weights_s for work in works[1:])
    share = inputs / (inputs + weights)
    return Work(forward_s=forward, inputs_s=backward * share, weights_s=backward * (1 - share))


def show(what: str, stages: int, micro_batches: int, found: Iterator[dict[str, Any]]) -> None:
    for (name, chunks), each in zip(SCHEDULES.items(), found, strict=True):
        works = [Work(forward_s=f, inputs_s=i, weights_s=w) for f, i, w in each["works"]]
        formula = idle_share(name, mean_of(works), stages=stages, micro_batches=micro_batches, chunks=chunks)
        on_paper = replayed_idle(each["orders"], works, chunks=chunks)
        cells = [f"{100 * value:.1f} %" for value in (formula, on_paper, each["measured"])]
        off = each["measured"] / formula - 1
        print(
            f"| {what} | {stages} | {micro_batches} | {name} | {' | '.join(cells)} | {100 * off:+.0f} % |", flush=True
        )
        if "seconds" in each:
            times = [[round(1e3 * part) for part in work] for work in each["works"]]
            print(
                f"{name}: step {each['seconds']:.2f} s, forward, inputs, weights in ms by stage {times}, idle of all "
                f"steps {each['all']}",
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("sleeping", "computing"))
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        be_a_rank(asked.rank)
        return
    print("| stages | number | micro-batches | schedule | formula | replayed | measured | off |")
    print("|---|--:|--:|---|--:|--:|--:|--:|", flush=True)
    for stages in () if asked.only == "computing" else (2,) if asked.quick else (2, 4, 8):
        seconds = SLEEP_S / 5 if asked.quick else SLEEP_S
        show("sleeping", stages, stages, run(stages, awake=False, seconds=seconds))
    if not asked.quick and asked.only != "sleeping":
        show("computing, pinned", 2, MICRO_BATCHES, run(2, awake=True))


if __name__ == "__main__":
    main()
