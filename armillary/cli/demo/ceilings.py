"""Stage 1 of the demo: what this machine reaches, by a quick measurement of memory, GEMMs and the ranks' link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from armillary.cli.bench.bench import measure_engine
from armillary.cli.demo.state import DemoState
from armillary.cli.open_model import pick_torch_device
from armillary.cli.progress import on_bar
from armillary.store.peaks import Peaks, load_peaks, save_peaks
from armillary.units import bandwidth_text, flops_per_s_text, seconds_text

if TYPE_CHECKING:
    from armillary.profiling.ceilings.ceilings import Ceilings

LIMITS_S = {"gemm": 4.0, "bandwidth": 4.0, "passes": 1.0, "launch": 1.0, "attention": 3.0}
"""sections of `bench ceilings` that plans and rooflines are based on, the most important first, and the time limit of
each on a busy machine"""
TOTAL_S = 15.0
"""time limit of all sections, on any machine; a small engine and the ranks' link take a few seconds each on top"""
SECOND_S = 18.0
"""until then, sections of REPEATED are measured a second time, and the better result counts: other processes take the
cores now and then"""
REPEATED = ("gemm", "bandwidth", "passes")
LONGEST_S = 35.0
"""a small engine that has not answered by then is left out"""

ALONE = ("gemm", "passes", "attention")
"""sections measured again for the threads of one rank: cores share memory bandwidth, but not their vector units"""


def measure(state: DemoState) -> None:
    """The ceilings, stored for every plan and profile to come; those of today are not measured twice."""
    with state.stage("measure", "what this machine reaches (quick; armillary bench ceilings is thorough)") as say:
        device = pick_torch_device(None)
        from armillary.profiling.ceilings.ceilings import name_of

        peaks = load_peaks(state.home, name_of(device))
        if peaks is None or not is_known(peaks, state.recipe.layout.num_devices):
            peaks = _measured(state, device)
        text = ceilings_text(peaks)
        state.out.say(f"{peaks.device}, {peaks.date}: {text}")
        say(text)


def is_known(peaks: Peaks, ranks: int) -> bool:
    """Whether all that is needed was measured today, the ranks' link included where there are several."""
    linked = ranks < 2 or any(point["world"] == ranks for point in peaks.points.get("collective", ()))
    both = all(peaks.best_gemm(dtype) for dtype in ("fp32", "bf16"))
    kinds = ("copy", "attention", "launch", *(("calls",) if " thread" in peaks.device else ()))
    complete = both and all(peaks.points.get(kind) for kind in kinds)
    return complete and linked and peaks.date == time.strftime("%Y-%m-%d")


def _measured(state: DemoState, device: Any) -> Peaks:
    from armillary.machine.cores import BUSY_CORES
    from armillary.profiling.ceilings.ceilings import name_of
    from armillary.profiling.ceilings.collectives import QUICK_SIZES, measure_collectives

    ranks, begin = state.recipe.layout.num_devices, time.monotonic()
    measurements = [
        _measure_section(state, device, section, threads, min(limit, begin + TOTAL_S - time.monotonic()))
        for section, threads, limit in sections(device, ranks)
    ]
    if ranks > 1:
        with state.out.progress("measuring all-reduce", unit="case") as bar:
            between = measure_collectives(
                device, worlds=(ranks,), ops=("all_reduce",), sizes=QUICK_SIZES, budget_s=0.05, watch=on_bar(bar)
            )
        save_peaks(state.home, between.peaks)
    for section, threads, limit in sections(device, ranks):
        left = begin + SECOND_S - time.monotonic()
        if section in REPEATED and device.type == "cpu" and left > 1.0:
            _measure_section(state, device, section, threads, min(limit, left))
    if device.type == "cpu":
        measure_engine(state.out, state.home, begin + LONGEST_S - time.monotonic())
    skipped = sum(measurement.skipped for measurement in measurements)
    busy = max(measurement.other_cores or 0.0 for measurement in measurements) if device.type == "cpu" else 0.0
    if busy > BUSY_CORES:
        state.note(f"other work kept {busy:.1f} cores busy while ceilings were measured: figures of times are rough")
    if skipped:
        state.note(f"{skipped} ceilings were left out when the time for measuring was over: figures of times are rough")
    peaks = load_peaks(state.home, name_of(device))
    assert peaks is not None, "they were saved"
    return peaks


def _measure_section(state: DemoState, device: Any, section: str, threads: int | None, limit_s: float) -> Ceilings:
    """Measure one section and store it; what was measured before counts where it was faster."""
    from armillary.profiling.ceilings.ceilings import measure_ceilings

    with state.out.progress(f"measuring {section}", unit="case") as bar, _computing_with(threads):
        measured = measure_ceilings(device, quick=True, only=(section,), limit_s=max(0.1, limit_s), watch=on_bar(bar))
    known = load_peaks(state.home, measured.peaks.device)
    save_peaks(
        state.home,
        known.better_of(measured.peaks) if known is not None and known.date == measured.peaks.date else measured.peaks,
    )
    return measured


def sections(device: Any, ranks: int) -> Iterator[tuple[str, int | None, float]]:
    """(section, threads, limit): all of the device, then a rank's share of the CPU cores alone."""
    import torch

    for section, limit in LIMITS_S.items():
        yield section, None, limit
    threads = max(1, torch.get_num_threads() // ranks)
    if device.type == "cpu" and threads < torch.get_num_threads():
        for section in ALONE:
            yield section, threads, LIMITS_S[section]


@contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    """torch computes with this many threads inside the block; none: as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ceilings_text(peaks: Peaks) -> str:
    """'bf16 310 GFLOP/s · memory 21 GB/s · all-reduce of 2 ranks 60 µs + 4.1 GB/s'."""
    parts = [
        f"{dtype} {flops_per_s_text(best)}{' (emulated)' if peaks.is_emulated(dtype) else ''}"
        for dtype in ("fp32", "bf16")
        if (best := peaks.best_gemm(dtype))
    ]
    copy = peaks.best_copy()
    parts += [f"memory {bandwidth_text(copy)}"] if copy else []
    for point in peaks.points.get("collective", ()):
        if point["op"] == "all_reduce":
            start, rate = seconds_text(point["alpha_s"]), bandwidth_text(point["bytes_per_s"])
            parts.append(f"all-reduce of {point['world']} ranks {start} and {rate}")
    return " · ".join(parts) or "nothing could be measured: the catalogue's figures stand in"
