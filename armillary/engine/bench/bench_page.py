"""The result of `bench serve` as bars: an SVG file, or an HTML page that loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from armillary.report.bars import Bar, BarGroup, bars, bars_file
from armillary.report.page import document, heading, section, table
from armillary.units import bandwidth_text, seconds_text

if TYPE_CHECKING:
    from armillary.engine.bench.bench import ServeBench
    from armillary.engine.bench.measure import Served

_LABEL = "tokens per second by batching mode"
COLUMNS = ("batching", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "steps", "per schedule")


def cells(mode: Served) -> list[str]:
    """A row of the table."""
    times = (mode.ttft_p50_s, mode.ttft_p99_s, mode.itl_p50_s, mode.itl_p99_s)
    return [
        mode.name,
        f"{mode.tokens_per_s:,.0f}",
        *map(seconds_text, times),
        f"{mode.steps:,}",
        seconds_text(mode.schedule_s),
    ]


def title(bench: ServeBench) -> str:
    return f"{bench.model} on {bench.device}, {bench.dtype}"


def workload(bench: ServeBench) -> str:
    """What all modes were given."""
    return (
        f"the same {bench.modes[0].requests} requests in bursts of {bench.burst}, {bench.max_running} together at most"
        if bench.modes
        else "no requests"
    )


def picture(bench: ServeBench) -> str:
    """Bars of tokens per second by batching mode, as an SVG file."""
    return bars_file(_bars(bench), label=_LABEL, caption=f"{title(bench)}: {workload(bench)}")


def _bars(bench: ServeBench) -> list[BarGroup]:
    return [
        BarGroup(
            name=mode.name,
            bars=[
                Bar(
                    value=mode.tokens_per_s,
                    text=f"{mode.tokens_per_s:,.0f} tokens/s, TTFT p50 {seconds_text(mode.ttft_p50_s)}",
                )
            ],
        )
        for mode in bench.modes
    ]


def bench_page(bench: ServeBench) -> str:
    """The single stream in a sentence, then the modes as bars and as a table."""
    single = (
        f"A single stream: {bench.single.tokens_in} tokens in {seconds_text(bench.single.ttft_p50_s)}, then "
        f"{bench.single.decode_tokens_per_s:,.1f} tokens/s = {bandwidth_text(bench.single_bytes_per_s)}."
    )
    return document(
        title(bench),
        (
            heading(title(bench), single),
            section("Batching modes", bars(_bars(bench), label=_LABEL)),
            section("In numbers", table(COLUMNS, map(cells, bench.modes))),
        ),
    )
