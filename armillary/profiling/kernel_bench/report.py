"""The kernel bench as one page of bars: each case a group, each version a bar, its length the share of the ceiling."""

from __future__ import annotations

from html import escape

from armillary.profiling.kernel_bench.results import KernelBench, KernelRow, Measured
from armillary.units import bandwidth_text, flops_per_s_text, seconds_text

WIDTH, LEFT, RIGHT, BAR, GAP = 1000, 330, 190, 13, 14
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
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#223;background:#fff}h2{margin:1.6em 0 .3em}"
    "svg{max-width:100%;font:12px system-ui,sans-serif}.won{font-weight:600}.dim{fill:#667}"
    "svg text{paint-order:stroke;stroke:#fff;stroke-width:3px}"
    "@media(prefers-color-scheme:dark){body{background:#14171c;color:#dde}svg text{fill:#dde;stroke:#14171c}"
    "svg .dim{fill:#9ab}}"
)


def bench_page(bench: KernelBench) -> str:
    """A page that needs nothing else."""
    tops = ", ".join(f"{name} {rate_text(name, top)}" for name, top in bench.ceilings.items())
    ops = dict.fromkeys(row.op for row in bench.rows)
    parts = [f"<h2>{escape(op)}</h2>" + _chart([row for row in bench.rows if row.op == op]) for op in ops]
    return (
        f"<!doctype html><meta charset='utf-8'><title>kernels on {escape(bench.device)}</title><style>{_STYLE}</style>"
        f"<h1>Kernels on {escape(bench.device)}</h1><p>{bench.date}. Bars: share of the ceiling measured in this run "
        f"({escape(tops)}), forward full, backward pale. What choose() takes is bold.</p>{''.join(parts)}\n"
    )


def rate_text(ceiling: str, rate: float) -> str:
    return bandwidth_text(rate) if ceiling in ("copy", "read") else flops_per_s_text(rate)


def _chart(rows: list[KernelRow]) -> str:
    y, parts = 22, []
    for row in rows:
        parts.append(f"<text x='0' y='{y}'>{escape(f'{row.name}: {row.shape}')}</text>")
        y += GAP - 6
        for one in (one for one in row.measured if one.forward_share):
            parts.append(_bars(one, row, y))
            y += 2 * BAR + 4 if one.backward_share else BAR + 4
        y += GAP + 10
    x = LEFT + (WIDTH - LEFT - RIGHT) / 1.1
    line = f"<line x1='{x:.0f}' x2='{x:.0f}' y1='4' y2='{y - GAP}' stroke='#d9572b' stroke-dasharray='4 3'/>"
    label = "Share of the ceiling by version"
    return f"<svg viewBox='0 0 {WIDTH} {y}' role='img' aria-label='{label}'>{line}{''.join(parts)}</svg>"


def _bars(one: Measured, row: KernelRow, y: int) -> str:
    colour = next((c for name, c in _COLOURS.items() if one.version.startswith(name)), "#3a8fb7")
    won = " class='won'" if one.version == row.chosen else ""
    parts = [f"<text x='{LEFT - 8}' y='{y + BAR - 2}' text-anchor='end'{won}>{escape(one.version)}</text>"]
    passes = (
        (one.forward_share, one.forward_rate, one.forward_s, 1.0),
        (one.backward_share, one.backward_rate, one.backward_s, 0.45),
    )
    for share, rate, seconds, strength in passes:
        if share and rate and seconds:
            width = min(1.1, share) * (WIDTH - LEFT - RIGHT) / 1.1
            text = f"{100 * share:.0f}% · {rate_text(row.ceiling, rate)} · {seconds_text(seconds)}"
            parts.append(
                f"<rect x='{LEFT}' y='{y}' width='{width:.1f}' height='{BAR}' fill='{colour}' opacity='{strength}'/>"
                f"<text class='dim' x='{LEFT + width + 6:.0f}' y='{y + BAR - 2}'>{escape(text)}</text>"
            )
            y += BAR
    return "".join(parts)
