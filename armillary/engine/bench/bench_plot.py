"""What `bench serve` found, as bars: a picture by itself (SVG), or a page that needs nothing else (HTML)."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from armillary.report.page import document, heading, section, table
from armillary.units import bandwidth_text, seconds_text

if TYPE_CHECKING:
    from armillary.engine.bench.bench import ServeBench
    from armillary.engine.bench.measure import Served

_WIDTH, _ROW, _LEFT, _RIGHT = 720, 56, 110, 150
_STYLE = """text{font:14px system-ui,sans-serif;fill:#374151}.dim{font-size:12px;fill:#6b7280}.bar{fill:#2f6fd0}
@media(prefers-color-scheme:dark){text{fill:#d1d5db}.dim{fill:#9ca3af}.bar{fill:#5b93e6}}"""
COLUMNS = ("batching", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "steps", "a decision")


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
        f"the same {bench.modes[0].requests} requests in bursts of {bench.burst}, {bench.together} together at most"
        if bench.modes
        else "no requests"
    )


def picture(bench: ServeBench) -> str:
    """Bars of tokens a second by batching mode."""
    most = max((mode.tokens_per_s for mode in bench.modes), default=1.0)
    height = 34 + _ROW * len(bench.modes)
    bars = "".join(_bar(mode, most, 34 + _ROW * i) for i, mode in enumerate(bench.modes))
    said = f"{title(bench)}: {workload(bench)}"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img' "
        f"aria-label='tokens a second by batching mode'><style>{_STYLE}</style>"
        f"<text x='8' y='20' class='dim'>{escape(said)}</text>{bars}</svg>\n"
    )


def _bar(mode: Served, most: float, top: int) -> str:
    long = mode.tokens_per_s / most * (_WIDTH - _LEFT - _RIGHT)
    waits = f"half of the first tokens within {seconds_text(mode.ttft_p50_s)}"
    return (
        f"<text x='{_LEFT - 10}' y='{top + 18}' text-anchor='end'>{escape(mode.name)}</text>"
        f"<rect class='bar' x='{_LEFT}' y='{top + 4}' width='{long:.1f}' height='20' rx='2'/>"
        f"<text x='{_LEFT + long + 8:.1f}' y='{top + 19}'>{mode.tokens_per_s:,.0f} tokens/s</text>"
        f"<text x='{_LEFT}' y='{top + 40}' class='dim'>{escape(waits)}</text>"
    )


def bench_page(bench: ServeBench) -> str:
    """The single stream in a sentence, then the modes as bars and as a table."""
    single = (
        f"A single stream: {bench.single.tokens_in} tokens in {seconds_text(bench.single.ttft_p50_s)}, then "
        f"{bench.single_tokens_per_s:,.1f} tokens/s = {bandwidth_text(bench.single_bytes_per_s)}."
    )
    return document(
        title(bench),
        (
            heading(title(bench), single),
            section("Ways of batching", picture(bench)),
            section("In numbers", table(COLUMNS, map(cells, bench.modes))),
        ),
    )
