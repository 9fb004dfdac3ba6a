"""What every exercise does with its result: print it, write table and plots, and put both into its page of the docs."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    own: dict[str, Any] = field(default_factory=dict)
    """options of this exercise alone, by name"""
    load: float = 0.0
    """processes that wanted a core when it began, on average over a minute"""

    @property
    def command(self) -> str:
        """As it was typed, without folders."""
        quick = " --quick" if self.quick else ""
        own = "".join(f" --{name} {value}" for name, value in self.own.items() if value is not None)
        return f"python examples/{Path(sys.argv[0]).name}{quick}{own}"


def read_options(name: str, about: str, own: Mapping[str, Mapping[str, Any]] | None = None) -> Options:
    """--quick, --out and --page, and what an exercise has of its own: name -> arguments of add_argument."""
    options = argparse.ArgumentParser(description=about.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="the smallest setting, to see that it runs")
    options.add_argument("--out", type=Path, default=Path(name), help="folder for table and plot")
    options.add_argument("--page", type=Path, help="page of the docs whose last section becomes this run")
    for other, arguments in (own or {}).items():
        options.add_argument(f"--{other}", **arguments)
    given = vars(options.parse_args())
    return Options(name=name, load=os.getloadavg()[0], own={each: given.pop(each) for each in own or {}}, **given)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ("---",) * len(heads), *rows))


def on_ranks(file: str, job: dict[str, Any], ranks: int = 2) -> Any:
    """Run `file --rank JOB` as ranks with one thread each, and return the JSON that rank 0 prints last."""
    # gloo listens on the loopback device; one thread also inside the libraries, from the start
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    line = [sys.executable, *launch, file, "--rank", json.dumps(job)]
    ran = subprocess.run(line, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout.strip().splitlines()[-1])


def finish(options: Options, text: str, chart: str, label: str, *more: tuple[str, str]) -> None:
    """Print the result and write it; `chart` is HTML with a drawing of armillary.report, `more` are further charts with
    their labels."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(text + "\n")
    plots = []
    for number, (drawing, about) in enumerate([(chart, label), *more], start=1):
        plot = options.out / ("plot.svg" if number == 1 else f"plot_{number}.svg")
        plot.write_text(standalone_svg(drawing, legend=True))
        plots.append((plot, about))
    print(f"\n{text}\n\ntable: {options.out / 'table.md'} · plot: {', '.join(str(plot) for plot, _ in plots)}")
    if options.page is not None:
        put_into(options, options.page, text, plots)


def put_into(options: Options, page: Path, text: str, plots: list[tuple[Path, str]]) -> None:
    """The end of the page, from its last heading on, becomes this run."""
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    shown = []
    for plot, label in plots:
        image = images / plot.name.replace("plot", options.name)
        image.write_text(plot.read_text())
        shown += ["", f"![{label}](images/{image.name})"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    busy = f", beside other programs (load average {options.load:.0f})" if options.load > 1 else ""
    said = f"{datetime.date.today()} · {cores} cores of {machine().cpu.model}{busy} · `{options.command}`:"
    above = page.read_text().partition(HEADING)[0].rstrip()
    page.write_text("\n".join([above, "", HEADING, "", said, "", text, *shown]) + "\n")
