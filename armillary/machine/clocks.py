"""Clocks, power and temperature, sampled while something is measured.

A ceiling is only worth comparing when the clock it was reached at stands beside it: chips slow down when they get hot
or draw too much.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Self

from armillary.machine.gpus import ask

EVERY_S = 0.25
Reading = Mapping[str, float]
_GPU_FIELDS = {
    "clocks.sm": ("sm_clock_hz", 1e6),
    "clocks.mem": ("memory_clock_hz", 1e6),
    "power.draw": ("power_w", 1.0),
    "temperature.gpu": ("temperature_c", 1.0),
}


class Clocks:
    """Samples `read` from a thread of its own; use as a context, then ask what was seen `between` two times."""

    def __init__(self, read: Callable[[], Reading], every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._seen: list[tuple[float, Reading]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clocks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        """The median of each figure between two times of `time.monotonic`; the nearest sample where none fell in."""
        seen = list(self._seen)
        if not seen:
            return {}
        inside = [reading for at, reading in seen if begin <= at <= end]
        inside = inside or [min(seen, key=lambda pair: abs(pair[0] - (begin + end) / 2))[1]]
        names = dict.fromkeys(name for reading in inside for name in reading)
        return {name: median(reading[name] for reading in inside if name in reading) for name in names}

    def _watch(self) -> None:
        while True:
            begin = time.monotonic()
            reading = self._read()
            if reading:
                self._seen.append(((begin + time.monotonic()) / 2, reading))
            if self._stop.wait(self._every_s):
                return


def gpu_clocks(identity: str) -> Callable[[], Reading]:
    """Reads one NVIDIA GPU by its index or UUID; nothing where the tool is absent."""

    def read() -> Reading:
        query = f"--query-gpu={','.join(_GPU_FIELDS)}"
        return parse_gpu(ask("nvidia-smi", f"--id={identity}", query, "--format=csv,noheader,nounits"))

    return read


def parse_gpu(text: str | None) -> Reading:
    """'1980, 3201, 612.1, 61' in SI units; what the driver does not say is left out."""
    cells = [cell.strip() for cell in (text or "").split(",")]
    pairs = zip(_GPU_FIELDS.values(), cells, strict=False)
    return {name: float(cell) * factor for (name, factor), cell in pairs if re.fullmatch(r"\d+(\.\d+)?", cell)}


def cpu_clocks(root: Path = Path("/")) -> Callable[[], Reading]:
    """Reads the mean clock of the cores; a virtual machine often reports its nominal clock only."""

    def read() -> Reading:
        try:
            text = (root / "proc/cpuinfo").read_text()
        except OSError:
            return {}
        megahertz = [float(found) for found in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
        return {"cpu_clock_hz": fmean(megahertz) * 1e6} if megahertz else {}

    return read
