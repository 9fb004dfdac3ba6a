"""Ceilings for what is about to be profiled: a quick look, once, where this device has none yet."""

from __future__ import annotations

from importlib.util import find_spec

from armillary.cli.output import Output
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, save_peaks

_NEEDED = ("bandwidth", "gemm", "attention", "launch")


def measure_once(out: Output, home: Home, device: str | None = None) -> None:
    """Measure and keep what the roofline needs; without torch of our own the catalogue has to do."""
    if find_spec("torch") is None:
        return
    from armillary.model.device import fit_threads, pick_device
    from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of

    fit_threads()
    target = pick_device(device)
    peaks = load_peaks(home, name_of(target))
    if peaks is not None and peaks.best_copy() and peaks.points.get("gemm"):
        return
    out.say(f"no ceilings of {name_of(target)} yet: a quick look now; armillary bench ceilings takes a thorough one")
    with out.progress("measuring", unit="case") as bar:
        found = measure_ceilings(
            target, quick=True, only=_NEEDED, watch=lambda done, total, what: bar.at(done, total, now=what)
        )
    save_peaks(home, found.peaks)
