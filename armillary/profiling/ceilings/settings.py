"""Settings of a measurement: the device, the time per point, and what is stored with a result.

The sections of `bench ceilings` take one of these and give points in the form of `store.peaks`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from armillary.kernels.core.timing import Call, Timing, time_calls
from armillary.machine.clocks import Clocks, cpu_clocks, gpu_clocks
from armillary.machine.memory import available_bytes

_UNKNOWN_CACHE = 32 << 20
_UNKNOWN_FREE = 4e9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a device is measured; `budget_s` is the time per point without warm-up, `folder` the one whose disk is
    measured."""

    device: torch.device
    quick: bool = False
    budget_s: float = 0.2
    folder: Path = Path(".")
    cache_bytes: int = _UNKNOWN_CACHE
    free_bytes: float = _UNKNOWN_FREE
    clocks: Clocks | None = None

    @property
    def on_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def time(self, *calls: Call, rest_s: float = 0.0, budget_s: float = 0.0) -> Timing:
        return time_calls(calls, self.device, budget_s=budget_s or self.budget_s, rest_s=rest_s)

    def point(
        self, tried: Mapping[str, Any], timing: Timing, measured: Mapping[str, float], **more: Any
    ) -> dict[str, Any]:
        """A point as `store.peaks` has it, with what may explain it in "beside"."""
        clocks = self.clocks.between(timing.began, timing.ended) if self.clocks else {}
        seen = {"spread": timing.spread, "samples": timing.samples, "method": timing.method}
        return {**tried, **measured, "beside": {**seen, **clocks, **more, "date": time.strftime("%Y-%m-%d")}}


def settings_for(device: torch.device, *, quick: bool = False, folder: Path = Path(".")) -> Settings:
    """Settings from the device's own cache and memory sizes."""
    return Settings(
        device=device,
        quick=quick,
        budget_s=0.06 if quick else 0.2,
        folder=folder,
        cache_bytes=cache_bytes(device),
        free_bytes=free_bytes(device),
    )


def clocks_of(device: torch.device) -> Clocks:
    if device.type == "cuda":
        return Clocks(gpu_clocks(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    return Clocks(cpu_clocks)


def cache_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """The L2 of a GPU; the largest cache of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units and size[:-1].isdigit()]
    return max(known, default=_UNKNOWN_CACHE)


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return available_bytes() or _UNKNOWN_FREE
