"""Offloading on one GPU: step, peak and what waits on the host, measured beside the plan, for the 1.14 B model.

    python -m benchmarks.offload_gpu [--only plain optimizer activations both nvme] [--rows 8] [--steps 6]
                                     [--layers 16] [--limit SECONDS] [--folder DIR] [--json FILE] [--tiny]

The model is that of train_one_gpu.py. Every case trains it from the same weights on the same tokens with the parts of
the training loop (`apply`, `optimizer_of`, `update`); losses are compared with those of the plain case. `--tiny` runs
a small model on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.machine.machine import here
from armillary.model.transformer import Transformer, build
from armillary.parallel.apply import apply
from armillary.parallel.mesh import Mesh
from armillary.parallel.world import World
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.profiling.ceilings import host_copy
from armillary.profiling.ceilings.ceilings import about, name_of
from armillary.profiling.ceilings.settings import settings_for
from armillary.spec.catalogue import config_from_fields
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import axis_sizes
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import ModelTable
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks
from armillary.training.setup.kernel_selection import use_kernels
from armillary.training.step.nonfinite import LossScaler
from armillary.training.step.numerics import autocast
from armillary.training.step.optimizer import set_learning_rate, update
from armillary.training.step.optimizer_offload import Offloaded, optimizer_of

MODEL: dict[str, Any] = {
    "name": "1.14B",
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 8192,
    "vocab": 32000,
    "context": 4096,
    "num_layers": 16,
}
TINY = MODEL | {
    "name": "tiny",
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 256,
    "num_layers": 4,
    "context": 128,
}
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
"""those that an H200 chooses, products as the library has them: nothing is left to choose"""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "optimizer": {"offload": "optimizer"},
    "activations": {"offload": "activations"},
    "both": {"offload": "both"},
    "full recompute": {"recompute": "full"},
    "both, full recompute": {"offload": "both", "recompute": "full"},
    "optimizer, 2 micro-batches": {"offload": "optimizer", "times": 2},
    "nvme": {"offload": "nvme"},
}


class Stepper:
    """One case: called, it takes a step and gives its loss."""

    def __init__(self, config: ModelConfig, layout: Layout, job: TrainJob, device: torch.device, folder: Path) -> None:
        self.layout, self.job, self.device, self.config, self.done = layout, job, device, config, 0
        model = random_model(config, device)
        names = KERNELS if device.type == "cuda" else None
        self.choices = use_kernels(model, job=job, layout=layout, timed=False, device=device, names=names)
        mesh = Mesh(axis_sizes(layout), World(rank=0, size=1, local_rank=0, device=device))
        self.sharded = apply(model, layout, mesh, loss=self.choices.loss)
        self.optimizer = optimizer_of(self.sharded, job, weights_16bit=self.choices.weights_16bit, folder=folder)
        set_learning_rate(self.optimizer, 1e-4)
        self.offloaded = Offloaded(self.sharded, self.optimizer)
        self.scaler = LossScaler(device, enabled=False)

    def __call__(self) -> Tensor:
        rows, times = self.layout.micro_batch, self.layout.num_micro_batches(self.job.batch_tokens, self.job.sequence)
        total = torch.zeros((), device=self.device)
        positions = torch.arange(self.job.sequence, device=self.device).expand(rows, -1)
        for _ in range(times):
            tokens = self.tokens(rows)
            with autocast(self.layout.precision, self.device):
                hidden = self.sharded.model(tokens[:, :-1], positions, self.choices.attend(None))
                loss = self.sharded.loss_sum(hidden, tokens[:, 1:], chunk=self.job.chunk_tokens(self.config.vocab))
            loss = loss / self.job.batch_tokens
            loss.backward()
            total += loss.detach()
        update(self.sharded, self.optimizer, self.scaler, self.job.clip)
        return total

    def tokens(self, rows: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.done)
        self.done += 1
        shape = (rows, self.job.sequence + 1)
        return torch.randint(self.config.vocab // 8, shape, generator=generator, device=self.device)


@torch.no_grad()
def random_model(config: ModelConfig, device: torch.device) -> Transformer:
    model = build(config, dtype=torch.float32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02, generator=generator)
    return model


def run(name: str, config: ModelConfig, args: argparse.Namespace, device: torch.device, home: Home) -> dict[str, Any]:
    given = dict(CASES[name])
    times = given.pop("times", 1)
    layout = Layout(micro_batch=args.rows, precision="bf16", **given)
    job = TrainJob(sequence=config.context, batch_tokens=args.rows * config.context * times, steps=1000)
    began = time.perf_counter()
    step = Stepper(config, layout, job, device, Path(args.folder))
    losses = [float(step()) for _ in range(2)]  # states are there, kernels built, host buffers pinned
    built_s = time.perf_counter() - began
    _sync(device, reset=True)
    step.offloaded.gauges()
    begin = time.perf_counter()
    found = [step() for _ in range(args.steps)]
    _sync(device)
    seconds = (time.perf_counter() - begin) / args.steps
    losses += [float(loss) for loss in found]
    gauges = step.offloaded.gauges()
    step.offloaded.finish()
    row = {"step_ms": 1e3 * seconds, "built_s": built_s, "losses": losses}
    if device.type == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if gauges:
        row |= {"host_gb": gauges["offloaded_bytes"] / 1e9, "stood_ms": 1e3 * gauges["offload_s"] / args.steps}
    return row | {"plan": planned(config, job, layout, home)}


def planned(config: ModelConfig, job: TrainJob, layout: Layout, home: Home) -> dict[str, float]:
    recipe = Recipe(model=ModelTable(name=config.name), layout=layout, train=job)
    found = predict(resolve(recipe, config, here(), home).case, as_arrays([layout]))
    return {
        "step_ms": 1e3 * float(found.time.total[0]),
        "peak_gb": float(found.memory.allocated[0]) / 1e9,
        "host_gb": float(found.memory.host[0]) / 1e9,
        "stood_ms": 1e3 * float(found.time.offload[0]),
    }


def measure_host(device: torch.device, home: Home) -> dict[str, float]:
    """GB/s of pinned copies and of AdamW on the host, into `home`, where the planner finds them."""
    settings = settings_for(device)
    cases = [
        case
        for case in host_copy.cases(settings)
        if case["direction"] == host_copy.ADAMW or (case["pinned"] and case["bytes"] == 1 << 28)
    ]
    peaks = new_peaks(name_of(device), about(device))
    rates = {}
    for kind, point in host_copy.measure(cases, settings):
        peaks = peaks.with_points(kind, [point])
        rates[point["direction"]] = round(point["bytes_per_s"] / 1e9, 1)
    save_peaks(home, peaks)
    return rates


def _sync(device: torch.device, *, reset: bool = False) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| offload | step ms | plan | stood still ms | plan | peak GB | plan | off | host GB | plan | loss off |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        plan, peak = row["plan"], row.get("peak_gb", float("nan"))
        alike = rows.get("plain", row)["losses"]
        apart = max(abs(a / b - 1) for a, b in zip(row["losses"], alike, strict=False))
        lines.append(
            f"| {name} | {row['step_ms']:.0f} | {plan['step_ms']:.0f} | {row.get('stood_ms', 0):.0f} | "
            f"{plan['stood_ms']:.0f} | {peak:.2f} | {plan['peak_gb']:.2f} | {plan['peak_gb'] / peak - 1:+.1%} | "
            f"{row.get('host_gb', 0):.2f} | {plan['host_gb']:.2f} | {apart:.1e} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=MODEL["num_layers"], help="fewer: for slow disks")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true")
    args, began = parser.parse_args(), time.perf_counter()
    device = torch.device("cpu" if args.tiny else "cuda")
    shape = TINY if args.tiny else MODEL | {"num_layers": args.layers}
    config = config_from_fields(shape | {"tied": False}, where="offload_gpu.py")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Home.at(folder)
        host = measure_host(device, home)
        print("GB/s", host, f"{time.perf_counter() - began:.0f} s", flush=True)
        for name in args.only:
            if time.perf_counter() - began > args.limit:
                print("no time for", name)
                continue
            try:
                rows[name] = run(name, config, args, device, home)
                row = rows[name]
                print(name, {k: round(v, 2) for k, v in row.items() if isinstance(v, float)}, flush=True)
            except KeyboardInterrupt:
                print("out of time in", name)
                break
            except Exception:
                traceback.print_exc()
                print(name, "failed:", traceback.format_exc().splitlines()[-1][:200], flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print("\n".join(table(rows)))
    if args.json:
        Path(args.json).write_text(json.dumps({"GB/s": host, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
