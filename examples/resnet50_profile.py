"""Profile a forward pass of ResNet-50: top operators, eager against compiled, the layer of peak memory.

    python examples/resnet50_profile.py              the GPU where there is one, else the CPU
    python examples/resnet50_profile.py --device cpu --html page.html
    python examples/resnet50_profile.py --quick      small images, nothing compiled, in seconds

It writes resnet50/table.md and resnet50/plot.svg. docs/exercises/resnet50.md explains the output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from exercise import finish, read_options
from resnet import resnet50

import armillary
from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of
from armillary.profiling.profile import Profile, Row
from armillary.profiling.report.profile_page import write_page
from armillary.profiling.report.profile_text import budget_line, memory_line
from armillary.profiling.trace.event_classes import short_name
from armillary.report.bars import series_bars
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, save_peaks
from armillary.units import seconds_text

SHOWN = 8
"""operators in the plot"""


def forward(device: str, batch: int, size: int, *, compiled: bool = False) -> Callable[[], object]:
    """One forward pass on random images, as a callable; gradients are kept, so activations are too."""
    torch.manual_seed(0)
    model = resnet50().to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    run = torch.compile(model) if compiled else model
    return lambda: run(images)


def measure(device: str) -> None:
    """Ceilings to hold the operators against: a quick look, once, where `armillary bench ceilings` took none."""
    home, target = Home.default(), torch.device(device)
    if load_peaks(home, name_of(target)) is None:
        save_peaks(home, measure_ceilings(target, quick=True, only=("bandwidth", "gemm", "launch")).peaks)


def told(title: str, found: Profile) -> list[str]:
    """The budget, the three longest operators, findings and memory."""
    lines = [f"{title}: {budget_line(found)}"]
    for place, row in enumerate(longest(found)[:3], start=1):
        times = f"CPU {seconds_text(row.cpu_s / found.steps)}, device {seconds_text(row.device_s / found.steps)}"
        kernel = short_name(row.details.get("kernels", ["on the host, no kernel"])[0])
        lines.append(f"  {place}. {row.name}, {row.calls // found.steps} calls: {times}; {row.bound} bound; {kernel}")
    lines += [f"  - {finding}" for finding in found.findings[:3]]
    return lines + ([f"  {memory_line(found)}"] if found.memory else [])


def longest(found: Profile) -> list[Row]:
    return sorted(found.operators, key=lambda row: -row.device_s)


def compared(eager: Profile, compiled: Profile) -> list[str]:
    faster = eager.step_s / compiled.step_s
    return [
        f"compiled: {seconds_text(eager.step_s)} → {seconds_text(compiled.step_s)}, {faster:.2f} × as fast",
        f"  kernels and operators per step: {calls(eager):,} → {calls(compiled):,}",
    ]


def calls(found: Profile) -> int:
    return sum(row.calls for row in found.kernels or found.operators) // found.steps


def chart(found: Profile) -> str:
    """The operators that take longest."""
    rows = [
        (f"{row.name}, {row.calls // found.steps} calls", [row.device_s / found.steps])
        for row in longest(found)[:SHOWN]
    ]
    return series_bars(rows, ("time per step",), label="Longest operators of ResNet-50", text=seconds_text)


OWN = {
    "device": {"help": "cpu or cuda"},
    "html": {"type": Path, "help": "also write a page"},
}


def main() -> None:
    options = read_options("resnet50", __doc__, OWN)
    batch, size, steps = (2, 32, 2) if options.quick else (8, 224, 3)
    device = options.own["device"] or ("cuda" if torch.cuda.is_available() and not options.quick else "cpu")
    if not options.quick:
        measure(device)
    eager = armillary.profile(forward(device, batch, size), steps=steps, warmup=1)
    words = told(f"ResNet-50 on {device}, {batch} images of {size} × {size}", eager)
    if page := options.own["html"]:
        print(f"  page: {write_page(eager, page)}")
    if not options.quick:  # last: modules are not named any more once something was compiled
        compiled = armillary.profile(forward(device, batch, size, compiled=True), steps=steps, warmup=1)
        words += ["", *told(f"compiled on {device}", compiled), *compared(eager, compiled)]
    text = "\n".join([f"torch {torch.__version__}, fp32:", "", "```", *words, "```"])
    finish(options, text, chart(eager), "the operators that take longest")


if __name__ == "__main__":
    main()
