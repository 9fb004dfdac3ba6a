"""Experts on one GPU: grouped products by version, and a training step of a mixture with 1.1 B active parameters.

    python benchmarks/experts_gpu.py [--rows 8] [--steps 8] [--limit SECONDS] [--only products step variants] [--small]

The model is the 1.14 B Llama of train_one_gpu.py with its MLP cut into 8 experts of 4,096, two a token (3.6 B in all),
trained with the balance loss, fp32 weights and fp32 AdamW states. Products are those of its layers: 65,536 rows of
32,768 tokens, spread as a router would; figures are the median of several calls on fresh rows. MFU counts 6·N of the
active parameters and causal attention as half, against 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from train_ours import SMALL, Ours
from train_peers import SEQUENCE

from armillary.kernels.core.agreement import check, expect
from armillary.kernels.gemm import grouped_triton as grouped_linear_triton
from armillary.kernels.gemm.grouped import GROUPED_LINEAR, GroupedCase
from armillary.parallel.apply import apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.world import World
from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.catalogue import config_from_fields
from armillary.store.home import Home
from armillary.training.step.router_balance import Routers

PEAK_FLOPS = 989e12
MIXTURE: dict[str, Any] = SMALL | {
    "ffn": 0,
    "family": "mixtral",
    "moe_every": 1,
    "moe": {"num_experts": 8, "top_k": 2, "ffn": 4096, "aux_loss": 0.01},
}
NAMES = {
    "norm": "triton",
    "add_norm": "triton",
    "activate": "triton",
    "rope": "triton",
    "attention": "cudnn",
    "attention, documents": "triton",
    "linear_cross_entropy": "triton",
    "block": "fused",
}
SHAPES = {"up": (8192, 2048), "down": (2048, 4096)}
TILES = {
    "128x256x64 s3": (128, 256, 64, 8, 3),
    "128x128x64 s4": (128, 128, 64, 4, 4),
    "256x128x64 s3": (256, 128, 64, 8, 3),
}


class Mixture(Ours):
    """The step with routers that are held in balance."""

    def __init__(self, home: Home, rows: int, names: dict[str, str], **fields: Any) -> None:
        config = config_from_fields(MIXTURE | fields, where="benchmark")
        super().__init__(config, home, rows=rows, names=names, timed=False)
        mesh = make_mesh(self.layout, World(rank=0, size=1, local_rank=0, device=torch.device("cuda")))
        self.routers = Routers(apply(self.model, self.layout, mesh, loss=self.choices.loss), self.job)
        self.gauges: dict[str, Tensor] = {}

    def __call__(self) -> Tensor:
        self.routers.start()
        loss = super().__call__()
        self.gauges = self.routers.finish()
        return loss


def step_of(home: Home, rows: int, steps: int, grouped: str, **fields: Any) -> dict[str, Any]:
    step = Mixture(home, rows, NAMES | {"grouped_linear": grouped}, **fields)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    rate = rows * SEQUENCE / seconds
    return {
        "step_ms": round(1e3 * seconds, 1),
        "tokens_per_s": round(rate),
        "loss": round(float(loss), 3),
        "mfu": round(100 * model_flops_per_token(step.config, SEQUENCE) * rate / PEAK_FLOPS, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "memory": step.memory(),
        "gauges": {name: round(float(value), 4) for name, value in step.gauges.items()},
    }


def parts_of(home: Home, rows: int) -> dict[str, float]:
    """Milliseconds of one step by kernel, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    step = Mixture(home, rows, NAMES | {"grouped_linear": "triton"})
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in found.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = {f"{event.key[:70]} x{event.count}": event.self_device_time_total / 1e3 for event in on_device}
    return {name: round(ms, 2) for name, ms in sorted(times.items(), key=lambda pair: -pair[1])[:32]}


# --- products


def inputs(rows: int, outputs: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shares = torch.rand(8, generator=generator, device="cuda") + 1.0
    ends = (shares.cumsum(0) / shares.sum() * rows).round().to(torch.int32)
    x = torch.randn(rows, into, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8, outputs, into, generator=generator, device="cuda", dtype=torch.bfloat16) * into**-0.5
    return x, weight, ends


def seconds_of(call: Callable[[], object], repeats: int = 7) -> float:
    for _ in range(2):
        call()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return median(found)


def speeds(run: Callable[..., Tensor], rows: int) -> dict[str, int]:
    """TFLOP/s of the forward product, and of both gradients together: a backward pass makes both."""
    found = {}
    for name, (outputs, into) in SHAPES.items():
        x, weight, ends = inputs(rows, outputs, into)
        flops = 2.0 * rows * outputs * into
        x.requires_grad_()
        weight.requires_grad_()
        y = run(x, weight, ends, True)
        dy = torch.randn_like(y)
        found[name] = round(flops / seconds_of(lambda: run(x, weight, ends, True)) / 1e12)  # noqa: B023
        took = seconds_of(lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True))  # noqa: B023
        found[f"{name} gradients"] = round(2 * flops / took / 1e12)
    return found


def agreement(name: str, *, small: bool) -> str:
    sizes = {"rows": 100, "outputs": 40, "inputs": 32} if small else {"rows": 8192, "outputs": 1536, "inputs": 1024}
    case = GroupedCase(experts=8, device="cuda", **sizes)
    generator = torch.Generator("cuda").manual_seed(1)
    version = GROUPED_LINEAR.version(name)
    assert version is not None
    worst = 0.0
    for given in (GROUPED_LINEAR.inputs(case, generator), (*with_rest(case, generator), False)):
        found = check(version.load(), GROUPED_LINEAR, expect(GROUPED_LINEAR, given, generator))
        if not found.agreed:
            return found.why_not
        worst = max(worst, found.error)
    return f"{worst:.1e}"


def with_rest(case: GroupedCase, generator: torch.Generator) -> tuple[Any, ...]:
    """Rows behind the last expert's."""
    x, weight, ends = GROUPED_LINEAR.inputs(case, generator)
    return x, weight, (ends * 0.8).to(torch.int32)


def tiled(tile: tuple[int, int, int, int, int], rows: int) -> dict[str, int]:
    """Speeds of our kernel with other tiles."""
    old = grouped_linear_triton._tile
    grouped_linear_triton._tile = lambda a, rows, **how: grouped_linear_triton.GroupedTile(*tile)
    try:
        return speeds(grouped_linear_triton.grouped_linear, rows)
    finally:
        grouped_linear_triton._tile = old


# --- in order


def rows_of(arguments: argparse.Namespace, home: Home) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    small, tokens = arguments.small, arguments.rows * SEQUENCE
    copies = 128 if small else 2 * tokens
    fields: dict[str, Any] = {"num_layers": 2, "hidden": 256, "vocab": 512} if small else {}
    for name in ("triton", "torch"):
        yield "products", f"{name} agrees", lambda name=name: agreement(name, small=small)
        version = GROUPED_LINEAR.version(name)
        assert version is not None
        yield "products", f"{name} TFLOP/s", lambda version=version: speeds(version.load(), copies)
    for grouped in ("triton", "torch"):
        yield "step", f"step, {grouped}", lambda g=grouped: step_of(home, arguments.rows, arguments.steps, g, **fields)
    for name, tile in TILES.items():
        yield "variants", f"tiles {name}", lambda tile=tile: tiled(tile, copies)
    yield "parts", "parts", lambda: parts_of(home, arguments.rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--only", nargs="*", default=["products", "step"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", default="")
    arguments, begin, found = parser.parse_args(), time.time(), {}
    for kind, name, measure in rows_of(arguments, Home.at(mkdtemp())):
        if kind not in arguments.only or time.time() - begin > arguments.limit:
            continue
        try:
            found[name] = measure()
        except Exception as error:  # one that fails must not cost the others
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
        torch.cuda.empty_cache()
        print(f"[{time.time() - begin:.0f} s] {name}: {json.dumps(found[name])[:900]}", flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
