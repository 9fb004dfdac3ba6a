"""Clocks, power and temperature, sampled during a measurement.

A ceiling is comparable only together with its clock: chips slow down when they are hot or draw too much power. GPUs
are read through NVML where the extra `nvidia` is installed and else through nvidia-smi, which every driver brings.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import median
from types import TracebackType
from typing import Any, Self

from armillary.machine.gpus import ask

INTERVAL_S = 0.25
Reading = Mapping[str, float]
_GPU_FIELDS = {
    "clocks.sm": ("sm_clock_hz", 1e6),
    "clocks.mem": ("memory_clock_hz", 1e6),
    "power.draw": ("power_w", 1.0),
    "temperature.gpu": ("temperature_c", 1.0),
}


class Clocks:
    """Samples `read` in a thread: a context manager, then `between` two times."""

    def __init__(self, read: Callable[[], Reading], interval_s: float = INTERVAL_S) -> None:
        self._read, self._interval_s = read, interval_s
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
        """The median of each figure between two times of `time.monotonic`; the nearest sample where there is none."""
        seen = list(self._seen)
        if not seen:
            return {}
        inside = [reading for at, reading in seen if begin <= at <= end]
        inside = inside or [min(seen, key=lambda sample: abs(sample[0] - (begin + end) / 2))[1]]
        names = dict.fromkeys(name for reading in inside for name in reading)
        return {name: median(reading[name] for reading in inside if name in reading) for name in names}

    def _watch(self) -> None:
        while True:
            begin = time.monotonic()
            reading = self._read()
            if reading:
                self._seen.append(((begin + time.monotonic()) / 2, reading))
            if self._stop.wait(self._interval_s):
                return


def gpu_clocks(identity: str) -> Callable[[], Reading]:
    """Reads one NVIDIA GPU by its UUID; nothing where neither NVML nor nvidia-smi is there."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
    except Exception:  # not installed, or no driver: NVML's errors are a class of the package
        query = f"--query-gpu={','.join(_GPU_FIELDS)}"
        arguments = (f"--id={identity}", query, "--format=csv,noheader,nounits")
        return lambda: parse_gpu(ask("nvidia-smi", *arguments))
    return lambda: _read_nvml(pynvml, handle)


def _read_nvml(nvml: Any, handle: Any) -> Reading:
    """The same figures from NVML; figures that the driver does not support are left out."""
    queries: dict[str, Callable[[], float]] = {
        "sm_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        "memory_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    }
    reading: dict[str, float] = {}
    for name, query in queries.items():
        with suppress(nvml.NVMLError):
            reading[name] = query()
    return reading


def parse_gpu(text: str | None) -> Reading:
    """'1980, 3201, 612.1, 61' in SI units; figures that the driver does not support are left out."""
    cells = [cell.strip() for cell in (text or "").split(",")]
    fields = zip(_GPU_FIELDS.values(), cells, strict=False)
    return {name: float(cell) * factor for (name, factor), cell in fields if re.fullmatch(r"\d+(\.\d+)?", cell)}


def cpu_clocks() -> Reading:
    """The mean clock of the cores; a virtual machine often reports its nominal clock only."""
    try:
        import psutil

        frequency = psutil.cpu_freq()
    except (ModuleNotFoundError, OSError):  # OSError: a system without the kernel's files
        return {}
    return {"cpu_clock_hz": frequency.current * 1e6} if frequency else {}
