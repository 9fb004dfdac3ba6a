"""LoRA on one GPU: memory and step time of the trainer's own parts, beside what the planner says.

    python benchmarks/lora_gpu.py [--rows 4] [--steps 6] [--timed] [--json FILE]

The model is train_one_gpu.py's (1.14 B parameters, sequences of 4,096), frozen in bf16, with fp32 adapters. `--timed`
lets kernels be chosen by timing; otherwise the first that agree are taken.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from train_one_gpu import SEQUENCE, SMALL, drawn

from armillary.model.transformer import build
from armillary.parallel.recompute import recompute
from armillary.planning.adapters import lora_of
from armillary.planning.case import TrainCase
from armillary.planning.layouts import of
from armillary.planning.measured import measured_peaks
from armillary.planning.prediction import predict
from armillary.spec import catalogue
from armillary.spec.catalogue import config_from_fields
from armillary.spec.job import TrainJob
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.store.home import Home
from armillary.training.kernels import use_kernels
from armillary.training.lora import add_lora, base_dtype
from armillary.training.optim import make_optimizer

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "rank 16, everywhere": ({"lora_rank": 16}, "none"),
    "rank 16, attention only": ({"lora_rank": 16, "lora_on": ("qkv", "out")}, "none"),
    "rank 64, everywhere": ({"lora_rank": 64}, "none"),
    "rank 16, everywhere, selective": ({"lora_rank": 16}, "selective"),
    "rank 16, everywhere, full": ({"lora_rank": 16}, "full"),
}
"""name -> settings of the job, recompute"""
CHUNK = 2048


def measure(config: ModelConfig, job: TrainJob, layout: Layout, *, steps: int, timed: bool) -> dict[str, Any]:
    """Peak of the allocator, and the median step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(config, dtype=base_dtype(job, layout.precision), device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    add_lora(model, job, precision=layout.precision)
    choices = use_kernels(model, job=job, layout=layout, timed=timed)
    recompute(model, kind=layout.recompute)
    optimizer = make_optimizer(model, job)
    batches = drawn(config, layout.micro_batch, 4)
    positions = torch.arange(SEQUENCE, device="cuda").expand(layout.micro_batch, -1).contiguous()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(steps + 2):
        tokens = batches[step % len(batches)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model(tokens[:, :-1], positions, choices.attend(None))
            loss = choices.loss(model, hidden, tokens[:, 1:], chunk=CHUNK)
        (loss / tokens[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"bytes": torch.cuda.max_memory_allocated(), "step_s": sorted(seconds[2:])[steps // 2]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=4)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--timed", action="store_true")
    options.add_argument("--json", type=Path)
    rows, steps, timed, file = vars(options.parse_args()).values()
    config, cluster = config_from_fields(SMALL, where="benchmark"), catalogue.cluster("h200")
    peaks = measured_peaks(Home.default(), cluster.chip)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rows} rows of {SEQUENCE}, "
          f"ceilings {'measured' if peaks else 'of the catalogue'}")  # fmt: skip
    print("| adapters | peak GB | predicted | error | step ms | predicted | error | tokens/s | MFU |")
    print("|---|---|---|---|---|---|---|---|---|")
    found = {}
    for name, (settings, kind) in CASES.items():
        job = TrainJob(sequence=SEQUENCE, batch_tokens=rows * SEQUENCE, loss_chunk=CHUNK, **settings)
        layout = Layout(micro_batch=rows, precision="bf16", recompute=kind)  # type: ignore[arg-type]
        case = TrainCase(model=config, cluster=cluster, sequence=SEQUENCE, batch_tokens=rows * SEQUENCE,
                         lora=lora_of(config, job), loss_chunk=CHUNK, measured=peaks)  # fmt: skip
        plan = predict(case, of([layout]))
        size, time_s = float(plan.memory.allocated[0]), float(plan.time.total[0])
        try:
            seen = measure(config, job, layout, steps=steps, timed=timed)
        except (RuntimeError, AssertionError) as error:  # one case must not take the others with it
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} |")
            continue
        rate = rows * SEQUENCE / seen["step_s"]
        found[name] = seen | {"predicted_bytes": size, "predicted_s": time_s, "parts": plan.memory.parts()}
        print(f"| {name} | {seen['bytes'] / 1e9:.2f} | {size / 1e9:.2f} | {size / seen['bytes'] - 1:+.1%} | "
              f"{1e3 * seen['step_s']:.1f} | {1e3 * time_s:.1f} | {time_s / seen['step_s'] - 1:+.1%} | {rate:,.0f} | "
              f"{rate * plan.model_flops / 989e12:.1%} |", flush=True)  # fmt: skip
    if file:
        file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
