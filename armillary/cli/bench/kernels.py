"""`armillary bench kernels`: every kernel on shapes of real models, against other versions and the measured ceiling."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.open_model import pick_torch_device
from armillary.cli.output import Output
from armillary.cli.progress import on_bar
from armillary.cli.verb_decorator import device_option, quick_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.units import bandwidth_text, flops_per_s_text, seconds_text

if TYPE_CHECKING:
    from armillary.profiling.kernel_bench.results import KernelBench, KernelRow, Measured


@verb
@device_option
@quick_option
@click.option("--op", "ops", multiple=True, metavar="NAME", help="norm, rope, attention …; repeatable.  [default: all]")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a page of bars (HTML) there.")
def kernels(out: Output, home: Home, device: str | None, quick: bool, ops: tuple[str, ...], plot: Path | None) -> None:
    """Time every version of every kernel, check it, name the winner.

    Shapes of real models, random data past the caches; what wins is remembered and used from then on.
    """
    target = pick_torch_device(device)
    if plot is not None and plot.suffix not in (".html", ".htm"):
        raise BadInput(f"what is drawn is a page of HTML; try --plot {plot.with_suffix('.html')}")
    from armillary.profiling.kernel_bench.bench import bench_kernels
    from armillary.profiling.kernel_bench.report import bench_page
    from armillary.store.atomic import write_text

    with out.progress("measuring", unit="case") as bar:
        bench = bench_kernels(target, ops=ops, quick=quick, home=home, watch=on_bar(bar))
    if plot is not None:
        write_text(plot, bench_page(bench))
    show(out, bench)
    if bench.skipped:
        out.warn(f"{bench.skipped} cases were left out when the time was over; --op NAME measures some")
    out.say(f"\nmeasured in {seconds_text(bench.seconds)}" + (f", drawn in {plot}" if plot else ""))
    out.result(asdict(bench), quiet=[f"{row.op}\t{row.name}\t{row.chosen}" for row in bench.rows])


def show(out: Output, bench: KernelBench) -> None:
    """One table per operation."""
    tops = ", ".join(f"{name} {_rate(name, top)}" for name, top in bench.ceilings.items())
    out.say(f"{bench.device} · {bench.date} · ceilings of this run: {tops}")
    for op in dict.fromkeys(row.op for row in bench.rows):
        rows, versions = [row for row in bench.rows if row.op == op], _others(bench, op)
        columns = ["case", "shape", "winner", "forward", "backward", "ours", "bar", *(f"× {name}" for name in versions)]
        out.say()
        out.table(op, columns, [[*_cells(row), *_speedups(row, versions)] for row in rows])


def _cells(row: KernelRow) -> list[Any]:
    won = row.of(row.chosen)
    forward = _achieved(row, won.forward_rate, won.forward_share) if won else None
    backward = _achieved(row, won.backward_rate, won.backward_share) if won else None
    return [row.name, row.shape, row.chosen or row.failed[:40], forward, backward, _shares(row.ours), _verdict(row)]


def _verdict(row: KernelRow) -> str | None:
    """Whether what was chosen holds the bar, and what our own kernel misses of it."""
    if row.bar is None:
        return None
    missed, own = row.misses(row.of(row.chosen)), row.misses(row.ours)
    text = f"{row.bar.text}: {'; '.join(missed) or 'holds'}"
    return text if missed or not own else f"{text} (ours: {'; '.join(own)})"


def _achieved(row: KernelRow, rate: float | None, share: float | None) -> str | None:
    percent = f" {100 * share:.0f}%" if share is not None else ""
    return None if rate is None else f"{_rate(row.ceiling, rate)}{percent}"


def _shares(measured: Measured | None) -> str | None:
    """'94% / 88%' of the ceiling, or why our kernel is out."""
    if measured is None or measured.forward_share is None:
        return measured.refused[:40] if measured else None
    return f"{100 * measured.forward_share:.0f}%" + (
        f" / {100 * measured.backward_share:.0f}%" if measured.backward_share else ""
    )


def _others(bench: KernelBench, op: str) -> list[str]:
    """Versions beside ours that were timed for some case of the op."""
    seen = dict.fromkeys(
        measured.version for row in bench.rows if row.op == op for measured in row.measured if measured.seconds
    )
    return [name for name in seen if not name.startswith("triton")]


def _speedups(row: KernelRow, names: list[str]) -> list[str | None]:
    won = row.of(row.chosen)
    return [
        f"{measured.seconds / won.seconds:.2f}" if measured and measured.seconds and won and won.seconds else None
        for measured in map(row.of, names)
    ]


def _rate(ceiling: str, rate: float) -> str:
    return bandwidth_text(rate) if ceiling in ("copy", "read") else flops_per_s_text(rate)
