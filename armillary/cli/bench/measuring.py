"""What the verbs that measure share: the device, --quick, and progress by cases."""

from __future__ import annotations

from typing import Any

import click

from armillary.cli.open_model import need_torch
from armillary.cli.output import Output
from armillary.cli.progress import Bar
from armillary.errors import ArmillaryError
from armillary.store.home import Home

device_option = click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
quick_option = click.option("--quick", is_flag=True, help="Fewer sizes and shorter looks.")


def pick(device: str | None) -> Any:
    """The torch device to measure."""
    need_torch("measuring")
    from armillary.model.device import fit_threads, pick_device

    fit_threads()
    return pick_device(device)


def on_bar(bar: Bar) -> Any:
    """A watch(done, total, what) that moves the bar."""
    return lambda done, total, what: bar.at(done, total, now=what)


def measure_engine(out: Output, home: Home, limit_s: float) -> None:
    """Calibrate the planner with a small engine (planning/calibrate); without it, plans are less exact."""
    from armillary.planning.calibrate.engine_calibration import calibrate

    try:
        with out.progress("measuring a small engine"):
            calibrate(home, limit_s)
    except ArmillaryError as error:
        out.warn(f"torch calls were not timed, so plans for this CPU are rough: {error}")
