"""Profile a forward pass of ResNet-50: top operators, eager against compiled, the layer of peak memory.

    python examples/resnet50_profile.py              the GPU where there is one, and the CPU
    python examples/resnet50_profile.py --device cpu --html page.html
    python examples/resnet50_profile.py --quick      small images on the CPU, in seconds

docs/exercises/resnet50.md explains the output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from resnet import resnet50

import armillary
from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of
from armillary.profiling.profile import Profile, Row
from armillary.profiling.report.profile_page import write_page
from armillary.profiling.report.profile_text import budget_line, memory_line
from armillary.profiling.trace.event_classes import short_name
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, save_peaks
from armillary.units import seconds_text


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


def show(title: str, found: Profile) -> None:
    print(f"\n{title}: {budget_line(found)}")
    for place, row in enumerate(top_three(found), start=1):
        times = f"CPU {seconds_text(row.cpu_s / found.steps)}, device {seconds_text(row.device_s / found.steps)}"
        kernel = short_name(row.details.get("kernels", ["on the host, no kernel"])[0])
        print(f"  {place}. {row.name}, {row.calls // found.steps} calls: {times}; {row.bound} bound; {kernel}")
    for finding in found.findings[:3]:
        print(f"  - {finding}")
    if found.memory:
        print(f"  {memory_line(found)}")


def top_three(found: Profile) -> list[Row]:
    return sorted(found.operators, key=lambda row: -row.device_s)[:3]


def compare(eager: Profile, compiled: Profile) -> None:
    faster = eager.step_s / compiled.step_s
    print(f"\ncompiled: {seconds_text(eager.step_s)} → {seconds_text(compiled.step_s)}, {faster:.2f} × as fast")
    print(f"  kernels and operators per step: {calls(eager):,} → {calls(compiled):,}")


def calls(found: Profile) -> int:
    return sum(row.calls for row in found.kernels or found.operators) // found.steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="small images on the CPU, nothing compiled")
    options.add_argument("--device", help="cpu or cuda alone")
    options.add_argument("--html", type=Path, help="also write a page")
    quick, device, html = vars(options.parse_args()).values()
    batch, size, steps = (2, 32, 2) if quick else (16, 224, 5)
    devices = ["cpu"] if quick or not torch.cuda.is_available() else ["cpu", "cuda"]
    devices = [device] if device else devices
    for each in [] if quick else devices:
        measure(each)
    eager = {device: armillary.profile(forward(device, batch, size), steps=steps, warmup=2) for device in devices}
    for device, found in eager.items():
        show(f"ResNet-50 on {device}, {batch} images of {size} × {size}", found)
        if html:
            print(f"  page: {write_page(found, html.with_stem(f'{html.stem}-{device}'))}")
    for device in [] if quick else devices:  # last: modules are not named any more once something was compiled
        compiled = armillary.profile(forward(device, batch, size, compiled=True), steps=steps)
        show(f"compiled on {device}", compiled)
        compare(eager[device], compiled)


if __name__ == "__main__":
    main()
