"""A stacked bar as text: shares of a whole in one line of blocks, each part with its own shade."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

SHADES = "█▓▒░▚▞◆○"


def stacked_bar(parts: Mapping[str, float], whole: float | None = None, width: int = 50) -> str:
    """The parts in order, then the legend: '████▓▓▒····  █ weights 40 %  ▓ gradients 20 % …'; dots are what is free."""
    total = whole or sum(parts.values())
    if total <= 0:
        return ""
    shown = [(name, value) for name, value in parts.items() if value / total >= 0.005]
    shades = {name: SHADES[i % len(SHADES)] for i, (name, _) in enumerate(shown)}
    ends = [round(width * end / total) for end in accumulate(value for _, value in shown)]
    cells = [min(end, width) - min(begin, width) for begin, end in pairwise([0, *ends])]
    bar = "".join(shades[name] * count for (name, _), count in zip(shown, cells, strict=True))
    free = "·" * (width - len(bar)) if whole else ""
    legend = "  ".join(f"{shades[name]} {name} {value / total * 100:.0f} %" for name, value in shown)
    return f"{bar}{free}  {legend}"
