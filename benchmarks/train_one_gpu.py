"""Training speed of one GPU: our step, and what else this machine can import, on the same model in the same run.

    python benchmarks/train_one_gpu.py [--only ours torch hf 3b memory two hf-compiled parts] [--rows 8] [--steps 20]
                                       [--short] [--json FILE] [--limit SECONDS]

The model is Llama-shaped with 1.14 B parameters (hidden 2048, MLP 8192, 16 layers, 16 heads, 8 KV heads, vocabulary
32,000, untied) at sequences of 4,096. Ours keeps fp32 weights and fp32 AdamW states and clips by the gradients' norm;
the peers hold everything in bf16 and clip nothing, which is less work. Tokens are random, or words of the Python
library where that is said. A figure is the wall time of `--steps` steps in a row after four of warm-up. MFU counts 6·N
and causal attention as half, against 989 TFLOP/s.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_peers import SEQUENCE, Step, drawn, hugging_face, plain_torch, words

from armillary.kernels.adamw import AdamW, gradient_norm
from armillary.model.transformer import Transformer, build
from armillary.parallel.recompute import recompute
from armillary.spec.catalogue import config_from_fields
from armillary.spec.job import TrainJob
from armillary.spec.layout import Layout
from armillary.spec.mfu import model_flops_per_token
from armillary.spec.model import ModelConfig
from armillary.store.home import Home
from armillary.training.kernels import use_kernels

PEAK_FLOPS, WARM = 989e12, 4
SMALL: dict[str, Any] = {
    "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 8192, "vocab": 32000, "context": SEQUENCE,
    "num_layers": 16,
}  # fmt: skip
LARGE: dict[str, Any] = SMALL | {"hidden": 3072, "heads": 24, "num_layers": 28}


class Ours:
    """A step of ours, by the parts that the training loop uses."""

    def __init__(
        self, config: ModelConfig, home: Home, *, rows: int, kind: str = "none", micro_batches: int = 1,
        tokens: Callable[[ModelConfig, int], list[Tensor]] = drawn, names: dict[str, str] | None = None,
        run_steps: int = 1000,
    ) -> None:  # fmt: skip
        """`home` keeps the kernels that were chosen, for the next of the same shapes; `names` leaves nothing to choose.
        Products are timed for runs that last: `run_steps` says how long this one is."""
        self.config, self.rows, self.micro_batches, self.done = config, rows, micro_batches, 0
        self.model = random_model(config)
        job = TrainJob(sequence=SEQUENCE, batch_tokens=rows * SEQUENCE * micro_batches, steps=run_steps)
        layout = Layout(micro_batch=rows, precision="bf16", recompute=kind)  # type: ignore[arg-type]
        begin = time.perf_counter()
        self.choices = use_kernels(self.model, job=job, layout=layout, home=home, names=names)
        self.choose_s = time.perf_counter() - begin
        recompute(self.model, kind=kind)
        self.parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = AdamW(groups, copies=self.choices.copies, lr=1e-4, betas=(0.9, 0.95))
        self.batches = tokens(config, rows)
        self.positions = torch.arange(SEQUENCE, device="cuda").expand(rows, -1).contiguous()
        self.gradient_bytes = 0

    def forward_backward(self) -> Tensor:
        total = torch.zeros((), device="cuda")
        for _ in range(self.micro_batches):
            tokens = self.batches[self.done % len(self.batches)]
            self.done += 1
            hidden = self.model(tokens[:, :-1], self.positions, self.choices.attend(None))
            loss = self.choices.loss(self.model, hidden, tokens[:, 1:], chunk=2048)
            loss = loss / (tokens[:, 1:].numel() * self.micro_batches)
            loss.backward()
            total += loss.detach()
        return total

    def __call__(self) -> Tensor:
        loss = self.forward_backward()
        norm = gradient_norm(self.parameters)
        self.optimizer.step(scale=(1.0 / norm).clamp(max=1.0))
        self.gradient_bytes = bytes_of(p.grad for p in self.parameters)
        self.optimizer.zero_grad()
        return loss

    def memory(self) -> dict[str, float]:
        """GB by what it is for; the rest of the peak is activations and what kernels need in passing."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        held = {
            "weights": bytes_of(self.parameters), "copies": bytes_of(self.choices.copies.values()),
            "gradients": self.gradient_bytes, "optimizer": bytes_of(states),
        }  # fmt: skip
        held["activations"] = torch.cuda.max_memory_allocated() - sum(held.values())
        return {name: round(size / 1e9, 2) for name, size in held.items()}


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None and tensor.is_cuda)


@torch.no_grad()
def random_model(config: ModelConfig) -> Transformer:
    """Initial weights as `Transformer.initialize` has them, but drawn on the device."""
    model = build(config, dtype=torch.float32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        into_residual = name.endswith(("out.weight", "down.weight"))
        width = 0.02 / ((2 * config.num_layers) ** 0.5 if into_residual else 1)
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, width, generator=generator)
    return model


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


def measure(step: Step, config: ModelConfig, tokens: int, steps: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
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
        "power_w": watch.power_w, "clock_mhz": watch.clock_mhz,
        "step_ms": round(1e3 * seconds, 1), "tokens_per_s": round(rate), "loss": round(float(loss), 3),
        "mfu": round(100 * model_flops_per_token(config, SEQUENCE) * rate / PEAK_FLOPS, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }  # fmt: skip


def ours(config: ModelConfig, home: Home, rows: int, steps: int, **options: Any) -> dict[str, Any]:
    step = Ours(config, home, rows=rows, **options)
    found = measure(step, config, rows * SEQUENCE * step.micro_batches, steps)
    return found | {"choose_s": round(step.choose_s, 1), "memory_gb": step.memory(), "kernels": step.choices.names}


def parts(config: ModelConfig, home: Home, rows: int) -> dict[str, float]:
    """Milliseconds of one step by kernel, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    step = Ours(config, home, rows=rows)
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
    rows, steps, tokens = arguments.rows, arguments.steps, arguments.rows * SEQUENCE
    few = max(6, steps // 2)

    def chosen() -> dict[str, str]:
        """What was chosen for the first, less its products: other shapes take the same kernels."""
        return {key: name for key, name in found["ours"]["kernels"].items() if not key.startswith("product")}

    length = {"run_steps": 10 if arguments.short else 1000}
    yield "ours", lambda: ours(small, home, rows, steps, **length)
    yield "ours, words", lambda: ours(small, home, rows, steps, tokens=words, **length)
    yield "torch", lambda: measure(plain_torch(small, rows), small, tokens, steps)
    yield "hf", lambda: measure(hugging_face(small, rows, compiled=False), small, tokens, few)
    yield "3b", lambda: ours(large, home, rows // 2, few, names=chosen())
    yield "torch's products", lambda: ours(small, home, rows, few, names=chosen())
    for kind in ("selective", "full"):
        yield f"memory: {kind}", lambda kind=kind: ours(small, home, rows, few, kind=kind, **length)
    for kind in ("selective", "full"):
        yield f"memory: 3b {kind}", lambda kind=kind: ours(large, home, rows // 2, few, kind=kind, names=chosen())
    yield "two micro-batches", lambda: ours(small, home, rows, few, micro_batches=2, **length)
    yield "hf-compiled", lambda: measure(hugging_face(small, rows, compiled=True), small, tokens, steps)
    yield "parts", lambda: parts(small, home, rows)


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
    begin, found = time.monotonic(), {}
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


def line(name: str, found: dict[str, Any]) -> str:
    row = found[name]
    if "step_ms" not in row:
        return f"{name}: " + "; ".join(f"{key} {value}" for key, value in list(row.items())[:25])
    said = f"{name}: {row['step_ms']} ms, {row['tokens_per_s']} tokens/s, MFU {row['mfu']} %, "
    said += f"peak {row['peak_gb']} GB, {row['power_w']} W, {row['clock_mhz']} MHz"
    first = found.get("ours", {}).get("tokens_per_s")
    peer = name in ("torch", "hf", "hf-compiled")
    return said + (f", ours is {first / row['tokens_per_s']:.2f} times as fast" if first and peer else "")


if __name__ == "__main__":
    main()
