"""Ceilings: what this device, its memory, its host link and its disk reach, measured section by section.

Every section lists its cases first, so that progress can be shown; when the time is over, the remaining cases are
counted and reported, not guessed.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from armillary.errors import unknown
from armillary.machine.cores import BackgroundLoad
from armillary.machine.device_name import device_name
from armillary.profiling.ceilings import (
    attention_flops,
    bandwidth,
    disk,
    elementwise,
    fma,
    gemm,
    host_copy,
    launch_latency,
)
from armillary.profiling.ceilings.settings import clocks_of, settings_for
from armillary.store.peaks import Peaks, new_peaks

Case = dict[str, Any]
Watch = Callable[[int, int, str], None]
"""called with cases done, all cases, and the next case"""


SECTIONS: dict[str, ModuleType] = {
    "bandwidth": bandwidth,
    "gemm": gemm,
    "attention": attention_flops,
    "passes": elementwise,
    "fma": fma,
    "launch": launch_latency,
    "host_copy": host_copy,
    "disk": disk,
}
"""each module's `cases(settings)` lists what it measures, and `measure(cases, settings)` gives (kind, point) of each"""
LIMIT_S = {"cpu": 80.0, "cuda": 200.0}
QUICK_LIMIT_S = 18.0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Ceilings that were measured, and the number of cases that were not."""

    peaks: Peaks
    skipped: int
    seconds: float
    other_cores: float | None
    """cores that other processes kept busy meanwhile; None: not known"""


def measure_ceilings(
    device: torch.device,
    *,
    quick: bool = False,
    folder: Path = Path("."),
    only: Sequence[str] = (),
    limit_s: float | None = None,
    watch: Watch = lambda done, total, what: None,
) -> Ceilings:
    """Measure every section, or `only` some, within about `limit_s`."""
    limit_s = limit_s or (QUICK_LIMIT_S if quick else LIMIT_S[device.type])
    begin, background = time.monotonic(), BackgroundLoad()
    with clocks_of(device) as clocks:
        settings = replace(settings_for(device, quick=quick, folder=folder), clocks=clocks)
        plan = {name: cases for name in _chosen(only) if (cases := SECTIONS[name].cases(settings))}
        work = _Work(total=sum(map(len, plan.values())), end=begin + limit_s, watch=watch)
        peaks = new_peaks(name_of(device), about(device))
        for name, cases in plan.items():
            for kind, point in SECTIONS[name].measure(work.through(name, cases), settings):
                peaks = peaks.with_points(kind, [point])
            torch.cuda.empty_cache()  # before the next section looks at free memory
    busy = background.cores()
    return Ceilings(
        peaks=replace(peaks, about={**peaks.about, "other_cores": busy}),
        skipped=work.skipped,
        seconds=time.monotonic() - begin,
        other_cores=busy,
    )


def name_of(device: torch.device) -> str:
    """The name under which its peaks are stored: on a CPU it includes the number of torch's threads."""
    return device_name(device, threads=torch.get_num_threads())


def about(device: torch.device) -> dict[str, Any]:
    """Versions of software that may explain a difference."""
    known: dict[str, Any] = {"torch": str(torch.__version__), "python": platform.python_version()}
    if device.type == "cuda":
        return known | {"cuda": str(torch.version.cuda or torch.version.hip)}
    return known | {"threads": torch.get_num_threads(), "isa": str(torch.backends.cpu.get_cpu_capability())}


class _Work:
    """Hands out cases, counts them, and stops when the time is over."""

    def __init__(self, *, total: int, end: float, watch: Watch) -> None:
        self.total, self.end, self.watch = total, end, watch
        self.done = self.skipped = 0

    def through(self, name: str, cases: list[Case]) -> Iterator[Case]:
        for case in cases:
            self.watch(self.done, self.total, f"{name} {_label(case)}")
            if time.monotonic() < self.end:
                yield case
            else:
                self.skipped += 1
            self.done += 1
        self.watch(self.done, self.total, name)


def _label(case: Case) -> str:
    hidden = ("path", "block_bytes", "hot")
    shown = [value for key, value in case.items() if key not in hidden]
    return " ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in shown)


def _chosen(only: Sequence[str]) -> list[str]:
    for name in only:
        if name not in SECTIONS:
            raise unknown("section", name, SECTIONS)
    return [name for name in SECTIONS if not only or name in only]
