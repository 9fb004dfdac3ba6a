"""What every exercise does with its result: print it, write table and plot, and put both into its page of the docs."""

from __future__ import annotations

import argparse
import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.machine import machine
from armillary.report.standalone import standalone_svg

HEADING = "## What it printed here"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line of an exercise."""

    name: str
    quick: bool
    out: Path
    page: Path | None


def read_options(name: str, about: str) -> Options:
    """--quick, --out and --page."""
    options = argparse.ArgumentParser(description=about.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="the smallest setting, to see that it runs")
    options.add_argument("--out", type=Path, default=Path(name), help="folder for table and plot")
    options.add_argument("--page", type=Path, help="page of the docs whose last section becomes this run")
    return Options(name=name, **vars(options.parse_args()))


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ("---",) * len(heads), *rows))


def finish(options: Options, text: str, chart: str, label: str) -> None:
    """Print the result and write it; `chart` is HTML with a drawing of armillary.report."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(text + "\n")
    plot = options.out / "plot.svg"
    plot.write_text(standalone_svg(chart, legend=True))
    print(f"\n{text}\n\ntable: {options.out / 'table.md'} · plot: {plot}")
    if options.page is not None:
        put_into(options, options.page, text, plot, label)


def put_into(options: Options, page: Path, text: str, plot: Path, label: str) -> None:
    """The end of the page, from its last heading on, becomes this run."""
    image = page.parent / "images" / f"{options.name}.svg"
    image.parent.mkdir(exist_ok=True)
    image.write_text(plot.read_text())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quick = " --quick" if options.quick else ""
    ran = f"`python examples/{options.name}.py{quick}`"
    said = f"{datetime.date.today()} · {cores} cores of {machine().cpu.model} · {ran}:"
    above = page.read_text().partition(HEADING)[0].rstrip()
    page.write_text("\n".join([above, "", HEADING, "", said, "", text, "", f"![{label}](images/{image.name})"]) + "\n")
