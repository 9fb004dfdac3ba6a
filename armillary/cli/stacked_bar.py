"""A stacked bar as text: shares of a whole in one line of blocks, each part with its own shade."""

from __future__ import annotations

from collections.abc import Mapping

SHADES = "█▓▒░▚▞◆○"


def stacked_bar(parts: Mapping[str, float], whole: float | None = None, width: int = 50) -> str:
    """The parts in order, then the legend: '████▓▓▒····  █ weights 40 %  ▓ gradients 20 % …'; dots are what is free."""
    total = whole or sum(parts.values())
    if total <= 0:
        return ""
    shown = [(name, value) for name, value in parts.items() if value / total >= 0.005]
    shades = {name: SHADES[i % len(SHADES)] for i, (name, _) in enumerate(shown)}
    bar = "".join(shades[name] * round(width * value / total) for name, value in shown)[:width]
    free = "·" * (width - len(bar)) if whole else ""
    legend = "  ".join(f"{shades[name]} {name} {value / total * 100:.0f} %" for name, value in shown)
    return f"{bar}{free}  {legend}"
