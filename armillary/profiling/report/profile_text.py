"""A profile in words: the same short texts on the terminal and on the page."""

from collections.abc import Callable

from armillary.profiling.analysis.analyse import amdahl_of
from armillary.profiling.analysis.compare import Change
from armillary.profiling.profile import BUDGET, Profile, Row
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, scaled, seconds_text

PART_WORDS = {
    "useful": "useful",
    "inefficiency": "inefficient kernels",
    "unjudged": "not judged",
    "comm_exposed": "exposed communication",
    "launch_gap": "launch gaps",
    "host": "host",
    "sync": "sync and copies",
    "idle": "idle",
    "unknown": "unknown",
}
ROW_HEADS = ("name", "work", "calls", "device", "CPU", "FLOP/s", "B/s", "FLOP/B", "of roofline", "bound by", "module")


def budget_line(profile: Profile) -> str:
    """step 212 ms = useful 38 % + inefficient kernels 21 % + …; parts under half a per cent are left out."""
    parts = [(part, profile.fraction(part)) for part in BUDGET]
    texts = [f"{PART_WORDS[part]} {share * 100:.0f} %" for part, share in parts if share >= 0.005]
    return f"step {seconds_text(profile.step_s)} = {' + '.join(texts)}"


def top_rows(profile: Profile, count: int) -> list[Row]:
    """Kernels where a device ran them, operators else; those that did the work before those that only called them."""
    rows = profile.kernels or profile.operators
    return sorted(rows, key=lambda row: (row.device_s == 0, -row.seconds))[:count]


def top_operators(profile: Profile, count: int) -> list[Row]:
    """Operators whose work took time on the device, the longest first."""
    return sorted((row for row in profile.operators if row.device_s > 0), key=lambda row: -row.device_s)[:count]


def row_cells(row: Row, steps: int = 1) -> list[str]:
    """One operator or kernel as cells under ROW_HEADS; times and calls are of one step."""
    return [
        row.name,
        row.work,
        f"{row.calls / steps:,.3g}" if row.calls < 1e3 * steps else f"{row.calls / steps:,.0f}",
        seconds_text(row.device_s / steps) if row.device_s else "–",
        seconds_text(row.cpu_s / steps) if row.cpu_s else "–",
        _known(flops_per_s_text, row.flops_per_s).removesuffix("FLOP/s"),
        _known(bandwidth_text, row.bytes_per_s).removesuffix("B/s"),
        _known(lambda value: scaled(value, digits=2), row.intensity),
        _known(lambda value: f"{value:.0%}".replace("%", " %"), row.roofline_fraction),
        row.bound,
        row.module or "–",
    ]


def figures(row: Row, steps: int = 1) -> str:
    """All details of a row, one per line, as hovering shows them."""
    cells = dict(zip(ROW_HEADS, row_cells(row, steps), strict=True))
    lines = [f"{head}: {text}" for head, text in cells.items() if text != "–"]
    return "\n".join([*lines[1:], *(f"{key}: {value}" for key, value in row.details.items())])


def memory_line(profile: Profile) -> str:
    """memory peak 1.2 GB, most of it activations; blocks.3 holds 210 MB."""
    memory = profile.memory
    if memory is None:
        return ""
    text = f"memory peak {bytes_text(memory.peak_bytes)}"
    if memory.by_category:
        name, size = max(memory.by_category.items(), key=lambda item: item[1])
        text += f", most of it {name} ({bytes_text(size)})"
    if memory.by_module:
        name, size = max(memory.by_module.items(), key=lambda item: item[1])
        text += f"; {name} holds {bytes_text(size)}"
    return text


def amdahl_cells(profile: Profile, least: float = 0.01) -> list[list[str]]:
    """Class of work or part of the budget, its share, the speedup if it were twice as fast, and the limit."""
    return [
        [PART_WORDS.get(row.work, row.work), f"{row.share * 100:.1f} %", f"{row.doubled:.2f} ×", f"{row.ceiling:.2f} ×"]
        for row in amdahl_of(profile)
        if row.share >= least and row.work != "unknown"
    ]


def change_cells(change: Change) -> list[str]:
    """Before, after, what was saved, and how many times as fast."""
    saved = ("−" if change.saved_s < 0 else "") + seconds_text(abs(change.saved_s))
    times = f"{change.speedup:.2f} ×" if change.speedup else "–"
    return [seconds_text(change.before_s), seconds_text(change.after_s), saved, times]


def _known(text: Callable[[float], str], value: float | None) -> str:
    return text(value) if value is not None else "–"
