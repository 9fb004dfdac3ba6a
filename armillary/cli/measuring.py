"""What the verbs that measure share: the device, --quick, and progress by cases."""

from __future__ import annotations

from typing import Any

import click

from armillary.cli.open_model import need_torch
from armillary.cli.progress import Bar

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
