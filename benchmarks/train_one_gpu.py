"""Training speed of one GPU: our step, and what else this machine can import, on the same model in the same run; and
what the planner says of memory and step time, from ceilings measured in that run.

    python benchmarks/train_one_gpu.py [--only ceilings ours fp8 32k torch hf 3b memory hf-compiled parts] [--rows 8]
                                       [--steps 20] [--short] [--json FILE] [--limit SECONDS]

The model is Llama-shaped with 1.14 B parameters (hidden 2048, MLP 8192, 16 layers, 16 heads, 8 KV heads, vocabulary
32,000, untied) at sequences of 4,096. Ours keeps fp32 weights and fp32 AdamW states and clips by the gradients' norm;
the peers hold everything in bf16 and clip nothing, which is less work. Tokens are random, or words of the Python
library where that is said. A figure is the wall time of `--steps` steps in a row after four of warm-up; rows of eight
micro-batches sum gradients, ours in fp32, and take one optimiser step for all. MFU counts 6·N and causal attention as
half, against 989 TFLOP/s, the dense bf16 peak, also where products run in fp8.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_ours import LARGE, SMALL, Ours
from train_peers import SEQUENCE, Peer, hugging_face, plain_torch, words
from train_predicted import measure_peaks, predicted, table
from train_trainer import trainer_step

from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.arithmetic.params import parameters
from armillary.spec.catalogue import config_from_fields
from armillary.spec.model import ModelConfig
from armillary.store.home import Home

PEAK_FLOPS, WARM, MANY, LONG = 989e12, 4, 8, 32768
"""dense bf16 of an H100 or H200; steps of warm-up; micro-batches of a step that has several; a long sequence"""


# --- measuring


class Watch:
    """What nvidia-smi says of the chip meanwhile: long runs of products are held to its power limit."""

    def __enter__(self) -> Watch:
        command = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-lms", "200"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        said, _ = self.process.communicate()
        rows = [tuple(map(float, line.split(","))) for line in said.splitlines()[1:] if line.count(",") == 1]
        self.power_w, self.clock_mhz = (round(sum(column) / len(column)) for column in zip(*rows, strict=True))


def measure(
    step: Callable[[], Tensor | float], flops_per_token: float, tokens: int, steps: int, warm: int = WARM
) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    with Watch() as watch:
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / steps
    rate = tokens / seconds
    return {
        "power_w": watch.power_w,
        "clock_mhz": watch.clock_mhz,
        "step_ms": round(1e3 * seconds, 1),
        "tokens_per_s": round(rate),
        "loss": round(float(loss), 3),
        "mfu": round(100 * flops_per_token * rate / PEAK_FLOPS, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def ours(config: ModelConfig, home: Home, rows: int, steps: int, warm: int = WARM, **options: Any) -> dict[str, Any]:
    """Measured, beside what is predicted for it."""
    step = Ours(config, home, rows=rows, **options)
    adapters = sum(p.numel() for p in step.parameters) if step.job.lora_rank else 0
    frozen = parameters(config).multiplied if step.job.lora_rank else 0
    flops = model_flops_per_token(config, step.job.sequence, frozen=frozen, adapters=adapters)
    found = measure(step, flops, step.job.batch_tokens, steps, warm)
    return found | {
        "choose_s": round(step.choose_s, 1),
        "memory_gb": step.memory(),
        "kernels": step.choices.names,
        "predicted": predicted(config, step.job, step.layout, home),
    }


def trainer(
    config: ModelConfig, home: Home, rows: int, steps: int, kernels: dict[str, str], *, documents: bool = False
) -> dict[str, Any]:
    """Also the median and the slowest step, by the trainer's own gauge: a single stall hides in a mean. MFU counts
    whole rows, also where documents attend only to themselves."""
    with trainer_step(home, rows, kernels, documents=documents) as (step, seconds):
        found = measure(step, model_flops_per_token(config, SEQUENCE), rows * SEQUENCE, steps)
    each = sorted(1e3 * one for one in seconds[WARM:])
    return found | {"median_ms": round(each[len(each) // 2], 1), "slowest_ms": round(each[-1], 1)}


def peer(made: Peer, config: ModelConfig, rows: int, steps: int, micro_batches: int = 1) -> dict[str, Any]:
    made.micro_batches = micro_batches
    tokens = rows * SEQUENCE * micro_batches
    flops = model_flops_per_token(config, SEQUENCE)
    return measure(made, flops, tokens, steps, WARM if micro_batches == 1 else 1)


def parts(config: ModelConfig, home: Home, rows: int, **options: Any) -> dict[str, float]:
    """Milliseconds of one step by kernel, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    step = Ours(config, home, rows=rows, **options)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in found.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = {f"{event.key[:90]} x{event.count}": event.self_device_time_total / 1e3 for event in on_device}
    return {name: round(ms, 2) for name, ms in sorted(times.items(), key=lambda pair: -pair[1]) if ms > 0.05}


def rows_of(
    arguments: argparse.Namespace, home: Home, found: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every measurement by name, the most wanted first."""
    small, large = (config_from_fields(fields, where="benchmark") for fields in (SMALL, LARGE))
    rows, steps = arguments.rows, arguments.steps
    few, several = max(5, steps // 3), max(2, steps // 8)
    length: dict[str, Any] = {"run_steps": 10 if arguments.short else 1000}
    summed = length | {"warm": 1, "micro_batches": MANY, "kind": "selective", "every": 3}

    def chosen() -> dict[str, str]:
        """What was chosen for the first, less its products: other shapes take the same kernels."""
        return {key: name for key, name in found["ours"]["kernels"].items() if not key.startswith("product")}

    yield "ceilings", lambda: measure_peaks(home)
    yield "ours", lambda: ours(small, home, rows, steps, **length)
    yield "ours, the trainer", lambda: trainer(small, home, rows, steps, found["ours"]["kernels"])
    yield "ours, words", lambda: ours(small, home, rows, steps, tokens=words, **length)
    yield "torch", lambda: peer(plain_torch(small, rows), small, rows, steps)
    yield "hf", lambda: peer(hugging_face(small, rows, compiled=False), small, rows, few)
    yield from fp8_rows(small, home, rows, steps, length)
    for kind in ("selective", "full"):
        yield f"memory: {kind}", lambda kind=kind: ours(small, home, rows, few, kind=kind, **length)
    yield "3b", lambda: ours(large, home, rows // 2, few, names=chosen())
    for kind in ("selective", "full"):
        yield f"memory: 3b {kind}", lambda kind=kind: ours(large, home, rows // 2, few, kind=kind, names=chosen())
    yield "memory: lora", lambda: ours(small, home, rows // 2, few, names=chosen(), lora_rank=16)
    yield f"ours, {MANY} micro-batches", lambda: ours(small, home, rows, several, **summed)
    yield f"torch, {MANY} micro-batches", lambda: peer(plain_torch(small, rows), small, rows, several, MANY)
    yield (
        "ours, the trainer on documents",
        lambda: trainer(small, home, rows, few, found["ours"]["kernels"], documents=True),
    )
    yield "torch's products", lambda: ours(small, home, rows, steps, names=chosen())
    yield "hf-compiled", lambda: peer(hugging_face(small, rows, compiled=True), small, rows, steps)
    yield "parts", lambda: parts(small, home, rows)


def fp8_rows(
    config: ModelConfig, home: Home, rows: int, steps: int, length: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The same in fp8; and sequences of 32k tokens, one at a time, with whole layers made again."""
    narrow: dict[str, Any] = length | {"precision": "fp8"}
    many = replace(config, context=LONG)

    def long(precision: str) -> dict[str, Any]:
        how: dict[str, Any] = length | {"precision": precision, "sequence": LONG, "kind": "full", "timed": False}
        return ours(many, home, 1, max(3, steps // 4), warm=2, **how)

    yield "fp8", lambda: ours(config, home, rows, steps, **narrow)
    yield "32k, fp8", lambda: long("fp8")
    for scaling in ("tensor", "row"):
        yield f"fp8, scales a {scaling}", lambda kind=scaling: ours(config, home, rows, steps, scaling=kind, **narrow)
    yield "fp8, words", lambda: ours(config, home, rows, steps, tokens=words, **narrow)
    yield "32k, bf16", lambda: long("bf16")
    yield "fp8, selective", lambda: ours(config, home, rows, max(5, steps // 3), kind="selective", **narrow)
    yield "fp8 parts", lambda: parts(config, home, rows, **narrow)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of measurements, or how they begin")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no measurement is begun")
    parser.add_argument("--short", action="store_true", help="as a short run, whose products are left to torch")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's compiler and transformers warn about themselves
    begin = time.monotonic()
    found: dict[str, Any] = {}
    home = Home.at(tempfile.mkdtemp())
    for name, run in rows_of(arguments, home, found):
        if arguments.only and not any(name.startswith(start) for start in arguments.only):
            continue
        if time.monotonic() - begin > arguments.limit:
            print(f"{name}: left out, {arguments.limit:.0f} s are over", flush=True)
            continue
        try:
            found[name] = run()
        except Exception as error:  # a peer that fails says so, and the others are still measured
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        gc.collect()
        torch.cuda.empty_cache()
        print(line(name, found), f"[{time.monotonic() - begin:.0f} s]", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    print("\n".join(table(found)))


def line(name: str, found: dict[str, Any]) -> str:
    row = found[name]
    if "step_ms" not in row:
        return f"{name}: " + "; ".join(f"{key} {value}" for key, value in list(row.items())[:25])
    said = f"{name}: {row['step_ms']} ms, {row['tokens_per_s']} tokens/s, MFU {row['mfu']} %, "
    said += f"peak {row['peak_gb']} GB, {row['power_w']} W, {row['clock_mhz']} MHz"
    if "median_ms" in row:
        said += f", median {row['median_ms']} ms, slowest {row['slowest_ms']} ms"
    if "predicted" in row:
        said += f" (predicted {row['predicted']['step_ms']:.1f} ms, {row['predicted']['peak_gb']:.1f} GB)"
    same = f"ours, {MANY} micro-batches" if name.endswith("micro-batches") else "ours"
    first = found.get(same, {}).get("tokens_per_s")
    is_peer = name.split(",")[0] in ("torch", "hf", "hf-compiled")
    return said + (f", ours is {first / row['tokens_per_s']:.2f} times as fast" if first and is_peer else "")


if __name__ == "__main__":
    main()
