"""Naive, tiled and fused attention under the measured roofline of this machine: FLOPs, bytes, time and memory.

    python examples/attention_roofline.py             a minute; writes attention_roofline/table.md and plot.svg
    python examples/attention_roofline.py --quick     one short sequence

All three compute the same: the first writes the scores to memory, the second keeps a tile of them in the cache, the
third is torch's fused kernel. docs/exercises/attention_roofline.md says what to predict first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from exercise import finish, read_options, table
from torch import Tensor

from armillary.kernels.attention.attention import reference, sdpa
from armillary.profiling.record.profile_callable import profile
from armillary.report.rooflines import DevicePeaks, Operation, rooflines
from armillary.spec.arithmetic.attention_ops import AttentionShape, attention, self_spans
from armillary.store.home import Home
from armillary.training.telemetry.memory_gauges import MemoryWatch
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, seconds_text

HEADS, HEAD_DIM = 4, 64
SHAPE = AttentionShape(heads=HEADS, kv_heads=HEADS, qk_dim=HEAD_DIM, v_dim=HEAD_DIM)
TILE = 256
"""queries and keys of a tile: its scores are 256 kB per head"""
TOLERANCE = 1e-5
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tiled(q_BTND: Tensor, k_BTND: Tensor, v_BTND: Tensor) -> Tensor:
    """FlashAttention's algorithm (Dao et al., arXiv 2205.14135) as a loop in Python: for a block of queries, one block
    of keys after the other, with a running maximum m, a running sum l, and the output corrected when m grows."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BTND, k_BTND, v_BTND))
    length, scale = q.shape[2], q.shape[3] ** -0.5
    out = torch.empty_like(q)
    for begin in range(0, length, TILE):
        end = min(length, begin + TILE)
        rows = q[:, :, begin:end] * scale
        m = torch.full((*rows.shape[:3], 1), -torch.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(rows)  # noqa: E741
        for start in range(0, end, TILE):  # blocks of later keys are skipped: no query sees them
            stop = min(length, start + TILE)
            scores = rows @ k[:, :, start:stop].transpose(-1, -2)
            if stop > begin:  # the block on the diagonal
                scores += torch.full(scores.shape[-2:], -torch.inf).triu(begin - start + 1)
            larger = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights = (scores - larger).exp_()
            shrink = (m - larger).exp_()
            l = l * shrink + weights.sum(-1, keepdim=True)  # noqa: E741
            acc = acc * shrink + weights @ v[:, :, start:stop]
            m = larger
        out[:, :, begin:end] = acc / l
    return out.transpose(1, 2)


VERSIONS: dict[str, Attention] = {"naive": reference, "tiled": tiled, "fused": sdpa}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One version at one length; FLOPs are those of the pairs that the causal mask leaves."""

    version: str
    length: int
    seconds: float
    counted_bytes: float
    """that its operators read and write, each operand once per operator"""
    least_bytes: float
    """that must cross memory: queries, keys, values and output"""
    peak_bytes: float
    error: float

    @property
    def flops(self) -> float:
        return float(attention("", SHAPE, self_spans([self.length]), dtype="fp32").flops)

    @property
    def rate(self) -> float:
        return self.flops / self.seconds

    @property
    def intensity(self) -> float:
        return self.flops / self.counted_bytes

    def roof(self, bytes_per_s: float, peak: float) -> float:
        return min(peak, self.intensity * bytes_per_s)


def measure(version: str, length: int, home: Home, budget_s: float) -> Measured:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, HEADS, HEAD_DIM) for _ in range(3))
    run = partial(VERSIONS[version], q, k, v)
    right = reference(q, k, v)
    error = float((run() - right).norm() / right.norm())
    assert error < TOLERANCE, f"{version} differs from the reference by {error:.1e}"
    with MemoryWatch() as watch:
        run()
    counted = profile(run, steps=2, warmup=1, home=home, memory=False, stacks=False)
    operators = counted.operators
    return Measured(
        version=version,
        length=length,
        seconds=thread_s(run, budget_s),
        counted_bytes=sum(row.bytes or 0.0 for row in operators) / counted.steps,
        least_bytes=float(attention("", SHAPE, self_spans([length]), dtype="fp32").bytes),
        peak_bytes=float(sum(watch.peak().values())),
        error=error,
    )


def thread_s(call: Callable[[], object], budget_s: float) -> float:
    """Median seconds of a call on one thread, by that thread's clock, which stands still while other programs run."""
    call()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < budget_s:
        begin = time.thread_time()
        call()
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def roofs(budget_s: float) -> list[DevicePeaks]:
    """What one core reaches: the same GEMM peak over two bandwidths, of memory and of the cache in which tiles stay.
    `armillary bench ceilings` measures all of a machine, when it is idle."""
    size, large, small = 1024, torch.rand(1 << 24), torch.rand(1 << 16)
    matrix, out = torch.rand(size, size), torch.empty(size, size)
    peak = 2 * size**3 / thread_s(lambda: torch.mm(matrix, matrix, out=out), budget_s)
    rates = {
        name: 2 * source.nbytes / thread_s(partial(torch.empty_like(source).copy_, source), budget_s)
        for name, source in {"memory": large, "cache": small}.items()
    }
    return [
        DevicePeaks(name=f"{name}, {bandwidth_text(rate)}", flops_per_s=peak, bytes_per_s=rate)
        for name, rate in rates.items()
    ]


def row(each: Measured, found: list[DevicePeaks]) -> tuple[str, ...]:
    memory, cache = (each.roof(device.bytes_per_s, device.flops_per_s) for device in found)
    return (
        f"{each.length:,}",
        each.version,
        seconds_text(each.seconds),
        flops_per_s_text(each.rate),
        bytes_text(each.counted_bytes),
        bytes_text(each.least_bytes),
        f"{each.intensity:,.1f}",
        flops_per_s_text(memory),
        f"{each.rate / memory:.0%}",
        f"{each.rate / cache:.0%}",
        bytes_text(each.peak_bytes),
    )


def main() -> None:
    options = read_options("attention_roofline", __doc__)
    lengths, budget_s = ((128,), 0.05) if options.quick else ((256, 1024, 2048), 1.0)
    torch.set_num_threads(1)
    print("measuring the ceilings of one core …", flush=True)
    found = roofs(budget_s)
    with tempfile.TemporaryDirectory() as folder:
        home = Home.at(Path(folder))
        measured = [measure(version, length, home, budget_s) for length in lengths for version in VERSIONS]
    heads = ("tokens", "version", "time", "FLOP/s", "operators move", "at least", "FLOP per byte moved")
    heads += ("roof of memory", "of that", "of that of the cache", "peak memory")
    peak = flops_per_s_text(found[0].flops_per_s)
    text = f"{HEADS} heads of {HEAD_DIM}, causal, fp32, one thread; GEMMs reach {peak}, "
    text += " and ".join(device.name.replace(", ", " ") for device in found) + ":\n\n"
    text += table(heads, [row(each, found) for each in measured])
    points = [
        Operation(name=f"{each.version}, {each.length:,}", intensity=each.intensity, flops_per_s=each.rate)
        for each in measured
    ]
    label = "Attention under the roofs of memory and cache"
    chart = rooflines(found, label=label, y_text=flops_per_s_text, operations=points)
    finish(options, text, chart, "useful FLOP/s over FLOP per byte that the operators move, under the measured roofs")


if __name__ == "__main__":
    main()
