"""The kernel bench as one HTML page: bars of every version's share of the ceiling, per operation and case."""

from html import escape

from armillary.profiling.kernel_bench.results import KernelBench, KernelRow, Measured
from armillary.report.bars import Bar, BarGroup, bars
from armillary.report.page import document, heading, section
from armillary.units import bandwidth_text, flops_per_s_text, seconds_text

_COLOURS = {
    "triton": "#2f6fd0",
    "compile": "#d08a1f",
    "eager": "#8892a4",
    "torch": "#1f9d8a",
    "liger": "#c23b6b",
    "cudnn": "#5b8c2a",
    "flash": "#7a4fc0",
    "flex": "#a0439c",
}


def bench_page(bench: KernelBench) -> str:
    ceilings = ", ".join(f"{name} {rate_text(name, ceiling)}" for name, ceiling in bench.ceilings.items())
    below = (
        f"{bench.date}. Bars: share of the ceiling measured in this run ({ceilings}), forward full, backward pale. "
        "The version that choose() takes is bold."
    )
    title = f"Kernels on {bench.device}"
    ops = dict.fromkeys(row.op for row in bench.rows)
    sections = [section(op, "".join(_chart(row) for row in bench.rows if row.op == op)) for op in ops]
    return document(title, [heading(title, below), *sections])


def rate_text(ceiling: str, rate: float) -> str:
    return bandwidth_text(rate) if ceiling in ("copy", "read") else flops_per_s_text(rate)


def _chart(row: KernelRow) -> str:
    """Forward and backward bars of every version that was timed, the dashed line being the ceiling."""
    groups = [
        BarGroup(name=timed.version, bars=_bars(timed, row), bold=timed.version == row.chosen)
        for timed in row.measured
        if timed.forward_share
    ]
    chart = bars(groups, label="Share of the ceiling by version", full=1.1, limit=1.0) if groups else ""
    return f"<h3>{escape(f'{row.name}: {row.shape}')}</h3>{chart}"


def _bars(timed: Measured, row: KernelRow) -> list[Bar]:
    colour = next((colour for name, colour in _COLOURS.items() if timed.version.startswith(name)), "#3a8fb7")
    directions = (
        ("forward", timed.forward_share, timed.forward_rate, timed.forward_s, 1.0),
        ("backward", timed.backward_share, timed.backward_rate, timed.backward_s, 0.45),
    )
    return [
        Bar(
            value=share,
            text=(text := f"{100 * share:.0f}% · {rate_text(row.ceiling, rate)} · {seconds_text(seconds)}"),
            colour=colour,
            opacity=opacity,
            hover=f"{name} {text}",
        )
        for name, share, rate, seconds, opacity in directions
        if share and rate and seconds
    ]
