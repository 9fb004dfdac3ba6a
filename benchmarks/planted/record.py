"""Make the runs that need a GPU, by our own trainer and engine, and keep what they measured as small files.

    python -m benchmarks.planted.record FOLDER [--only NAME …] [--device cuda] [--tiny]

Checkpoints and exports are left out: only gauges, plan, recipe and state of each run are kept. `--tiny` shrinks the
models so that a CPU can try the script.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from armillary.profiling.ceilings.ceilings import measure_ceilings
from armillary.spec.recipe import Recipe
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.peaks import save_peaks
from armillary.store.runs import Run
from armillary.training import run_lifecycle
from armillary.training.checkpoint import checkpoint
from benchmarks.planted.record_cases import asked_for, record_each
from tests.planted.faults import Fault
from tests.planted.problem import Wish
from tests.planted.serve_small import serve_recipe, serving_recipe, warm
from tests.planted.traffic import at_once, mixed
from tests.planted.train_small import recipe_of, train_recipe

KEPT = ("gauges.jsonl", "plan.json", "recipe.json", "state.json")
KERNELS = {
    "norm": "triton",
    "add_norm": "triton",
    "activate": "triton",
    "rope": "triton",
    "attention": "cudnn",
    "attention, documents": "triton",
    "linear_cross_entropy": "triton",
    "block": "fused",
}
"""as an H200 chose them for a Llama shape (benchmarks/train_one_gpu_h200.md): choosing again takes a minute"""
SHAPE = {
    "num_layers": 12,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 4096,
    "vocab": 8192,
    "context": 4096,
}
NARROW = {"num_layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768}
TINY = {"num_layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 128, "vocab": 1024}


class Recording:
    """Where runs are made, how large, and on what."""

    def __init__(self, home: Home, device: str, *, tiny: bool) -> None:
        self.home, self.device, self.tiny = home, device, tiny

    def recipe(self, *, rows: int, micro_batch: int, steps: int = 26, sequence: int = 2048, **more: Any) -> Recipe:
        """A Llama shape of 200 M parameters, or what `more` makes of it."""
        shape = SHAPE | more.pop("model", {})
        if self.tiny:
            shape, sequence = shape | TINY, 64
        tables = {
            "model": {"name": "tinyllama-1.1b", **shape},
            "layout": {"micro_batch": micro_batch, "precision": "bf16", **more.pop("layout", {})},
            "train": {
                "sequence": sequence,
                "batch_tokens": rows * sequence,
                "steps": steps,
                "eval_every": 0,
                "profile_every": 10,
                **more.pop("train", {}),
            },
        }
        return recipe_of(Wish(), tables, self.home)

    def run(self, recipe: Recipe, home: Home, *, fault: Fault | None = None) -> Run:
        """Trained without what a recording does not need."""
        with _nothing_saved(), _kernels(self.device):
            return train_recipe(recipe, home, fault=fault, device=self.device)

    def train(self, *, fault: Fault | None = None, **asked: Any) -> Run:
        return self.run(self.recipe(**asked), self.home, fault=fault)

    def serve(self, *, graphs: bool, count: int = 64) -> Run:
        """The same shape answering short requests, all of them together."""
        shape = {key: value for key, value in SHAPE.items() if key not in ("vocab", "context")}
        tables = {"model": {} if self.tiny else shape, "serve": {"graphs": graphs, "max_running": count}}
        recipe = serving_recipe(Wish(), tables)
        requests = mixed(count, tokens_in=(32, 96), tokens_out=(96, 128), seed=0)
        if not graphs:
            warm(recipe, device=self.device)
        return serve_recipe(recipe, self.home, at_once(requests), device=self.device)


# --- the cases


def healthy(at: Recording) -> Run:
    """Large products, one micro-batch, nothing in the way."""
    return at.train(rows=8, micro_batch=8)


def sync(at: Recording) -> Run:
    """After every block the host asks the device for a number, ten times."""
    return at.train(rows=4, micro_batch=4, fault=Fault(kind="waits", amount=10))


def short_kernels(at: Recording) -> Run:
    """A narrow model, one short row at a time."""
    return at.train(rows=8, micro_batch=1, sequence=256, model=NARROW)


def full_memory(at: Recording) -> Run:
    """Something else holds so much memory that the run has next to none to spare."""
    usual = max(record.get("memory_reserved_bytes", 0.0) for record in read_gauges(healthy(at).gauges))
    return at.train(rows=8, micro_batch=8, fault=Fault(kind="ballast", amount=usual))


def no_graphs(at: Recording) -> Run:
    """Every kernel of a decode step is launched by the host."""
    return at.serve(graphs=False)


def graphs(at: Recording) -> Run:
    """The same with CUDA graphs."""
    return at.serve(graphs=True)


CASES: dict[str, Callable[[Recording], Run]] = {
    "gpu-healthy": healthy,
    "gpu-sync": sync,
    "gpu-graphs": graphs,
    "gpu-no-graphs": no_graphs,
    "gpu-short-kernels": short_kernels,
    "gpu-full-memory": full_memory,
}


# --- keeping them


@contextmanager
def _nothing_saved() -> Iterator[None]:
    """A run without checkpoint and export at its end, which a recording does not need."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(run_lifecycle.RunLifecycle, "save", lambda self, step: {}))
        stack.enter_context(mock.patch.object(run_lifecycle, "export", lambda *args, **named: args[2]))
        yield


def _kernels(device: str) -> Any:
    """Those of KERNELS on a GPU; a CPU has none to choose."""
    names = {} if device == "cpu" else KERNELS
    return mock.patch.object(checkpoint, "kernels_of", lambda run, step: names)


def keep(run: Run, folder: Path, home: Home) -> None:
    """The small files of a run; where its home was is nobody's business."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        text = (run.folder / name).read_text()
        (folder / name).write_text(text.replace(str(home.work), "home"))


def keep_runs(home: Home, folder: Path) -> None:
    """Of the case that ended, also where it failed; then out of the next one's sight."""
    for number, run in enumerate(sorted(home.runs.iterdir()) if home.runs.is_dir() else []):
        if not run.name.startswith(".") and (run / "gauges.jsonl").is_file():
            keep(Run(folder=run), folder.with_name(f"{folder.name}-{number}"), home)
            run.rename(run.with_name(f".{run.name}"))


def measured_home(folder: str, device: str) -> Home:
    """A home of its own, with the ceilings of the GPU."""
    home = Home.at(folder)
    if device == "cuda":
        found = measure_ceilings(
            torch.device("cuda", 0), quick=True, folder=home.work, only=("bandwidth", "gemm", "launch")
        )
        save_peaks(home, found.peaks)
    return home


def main() -> int:
    asked, begin = asked_for("record", CASES), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="armillary-record-") as folder:
        at = Recording(measured_home(folder, asked.device), asked.device, tiny=asked.tiny)
        print(f"ceilings [{time.monotonic() - begin:.0f} s]", flush=True)

        def record(name: str) -> str:
            keep(CASES[name](at), asked.folder / name, at.home)
            if asked.device == "cuda":
                torch.cuda.empty_cache()
            return name

        return record_each(asked.only, record, limit=asked.limit, begin=begin)


if __name__ == "__main__":
    raise SystemExit(main())
