"""What an asynchronous checkpoint costs training on one GPU, with a model of 3 B parameters and its AdamW states; and
that a kill during a save loses nothing, with one of 1.14 B.

    python benchmarks/checkpoint_gpu.py [--folder DIR]      about 6 minutes on an H200; 36 GB on disk, 40 GB of memory

Targets: the saving step takes at most 0.3 s longer, the ten steps after it together at most 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from armillary.parallel.consensus import Consensus
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import ModelTable
from armillary.spec.tables.train import Data, TrainJob
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.checkpoint.checkpoint import faults, newest
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.run_lifecycle import RunLifecycle
from armillary.training.step.numerics import seed
from armillary.training.trainer import Trainer
from armillary.training.trainer_state import tensors_of

LARGE: dict[str, Any] = {"num_layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "head_dim": 128}
SMALL: dict[str, Any] = {"num_layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn": 5632, "head_dim": 64}
WARM, BASE, AFTER = 8, 12, 10
VOCAB = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "checkpoint_gpu")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on any machine")
    parser.add_argument("--victim", type=Path, help="(used by the script itself)")
    options = parser.parse_args()
    shapes = [TINY, TINY] if options.small else [LARGE, SMALL]
    if options.victim is not None:
        be_killed(options.victim, shapes[1])
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}")
    measure(Home.at(options.folder / "large"), shapes[0])
    show_kill(options.folder / "small", shapes[1], small=options.small)


TINY: dict[str, Any] = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "head_dim": 16}


def resolved(home: Home, shape: dict[str, Any]) -> ResolvedRun:
    tiny = shape is TINY
    sequence, rows = (64, 2) if tiny else (4096, 4)
    recipe = Recipe(
        model=ModelTable(name="tinyllama-1.1b", overrides={**shape, "vocab": VOCAB, "context": sequence}),
        layout=Layout(micro_batch=rows, precision="fp32" if tiny else "bf16"),
        data=Data(source="stdlib", held_out=0.0),
        train=TrainJob(
            sequence=sequence, batch_tokens=rows * sequence, steps=1000, save_every=0, keep=2, profile_every=0
        ),
    )
    made = resolve_run(recipe, home, model_source(recipe, home))
    made.prepare()
    return made


@contextmanager
def opened(begun: ResolvedRun, run: Run) -> Iterator[tuple[Trainer, RunLifecycle]]:
    with join_world(None) as world, Trainer(begun.plan, world, home=begun.home, folder=run.folder) as trainer:
        seed(0, 0)
        lifecycle = RunLifecycle(run, trainer, None)
        try:
            yield trainer, lifecycle
        finally:
            lifecycle.close(None, None, None)


def step(trainer: Trainer, number: int) -> float:
    """Seconds of a step, until the device has its loss."""
    begin = time.perf_counter()
    report = trainer.step(number)
    assert report is not None
    return time.perf_counter() - begin


def measure(home: Home, shape: dict[str, Any]) -> None:
    begun = resolved(home, shape)
    run = begun.create_run()
    with opened(begun, run) as (trainer, lifecycle):
        print(f"{trainer.num_parameters / 1e9:.2f} B parameters")
        begin = time.perf_counter()
        lifecycle.saver.prepare(tensors_of(trainer))
        numbers = iter(range(1000))
        for _ in range(WARM):
            step(trainer, next(numbers))
        assert lifecycle.saver._making is not None
        lifecycle.saver._making.result()
        print(f"staging buffer ready {time.perf_counter() - begin:.1f} s after it was asked for, beside steps")
        base = [step(trainer, next(numbers)) for _ in range(BASE)]
        usual = statistics.median(base)
        begin = time.perf_counter()
        last = step(trainer, number := next(numbers))
        lifecycle.loss = 0.0
        lifecycle.save(number + 1)
        saving_s = time.perf_counter() - begin
        after = [step(trainer, next(numbers)) for _ in range(AFTER)]
        print("| | seconds |\n|---|---|")
        print(f"| median step of {BASE}, and their range | {usual:.3f} ({min(base):.3f} to {max(base):.3f}) |")
        print(f"| saving step, more than that | {saving_s - usual:+.3f} (target ≤ 0.3; the step itself {last:.3f}) |")
        print(f"| the {AFTER} steps after it, more together | {sum(after) - AFTER * usual:+.3f} (target ≤ 0.5) |")
        print(f"| each of them | {' '.join(f'{each:.3f}' for each in after)} |", flush=True)  # a disk may be slow
        lifecycle.saver.finish()
        (saved,) = lifecycle.saver.take_saved()
        print(f"| stall that the trainer notes | {saved.stall_s:.3f} |")
        print(f"| from request to commit of {saved.bytes / 1e9:.1f} GB | {saved.seconds:.1f} |", flush=True)
        begin = time.perf_counter()
        print(f"checksums: {faults(run, number + 1) or 'all right'} ({time.perf_counter() - begin:.1f} s)")


def be_killed(folder: Path, shape: dict[str, Any]) -> None:
    """Save once, take steps, begin to save again; the parent kills this process then."""
    home = Home.at(folder)
    begun = resolved(home, shape)
    run = begun.create_run(name="victim")
    with opened(begun, run) as (trainer, lifecycle):
        lifecycle.loss = 0.0
        for number in range(3):
            step(trainer, number)
        lifecycle.save(3, wait=True)
        for number in range(3, 6):
            step(trainer, number)
        lifecycle.save(6)
        print("saving", flush=True)
        for number in range(6, 1000):
            step(trainer, number)


def show_kill(folder: Path, shape: dict[str, Any], *, small: bool) -> None:
    arguments = [sys.executable, __file__, "--victim", str(folder), *(["--small"] if small else [])]
    victim = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    for line in victim.stdout:
        if line.strip() == "saving":
            break
    time.sleep(0.0 if small else 1.0)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    begun = resolved(Home.at(folder), shape)
    run = next(iter(sorted((folder / "runs").glob("*-victim"))))
    left = Run(folder=run)
    partial = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    found = newest(left, Consensus(rank=0, size=1), print)
    print(f"killed during the save of step 6 ({len(partial)} partial folder left); the newest good one is {found}")
    with opened(begun, left) as (trainer, lifecycle):
        first = lifecycle.resume(found)
        print(f"resumed at step {first}; its first step took {step(trainer, first):.2f} s")


if __name__ == "__main__":
    main()
