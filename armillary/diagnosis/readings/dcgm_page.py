"""Pages of dcgm-exporter (port 9400) as a Reading of the devices: each scrape is one moment.

The exporter's default counters have no highest clock and no power limit: a device is then held against the fastest of
those that work, and DCGM_FI_DEV_CLOCK_THROTTLE_REASONS (or …_EVENT_REASONS), where exported, says what holds it down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from armillary.diagnosis.readings.device_csv import COLUMNS, reading_of_devices
from armillary.diagnosis.readings.prometheus import Page
from armillary.diagnosis.readings.reading import Reading

PREFIX = "DCGM_FI_"
_REASONS = ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")
_ENGINE_ACTIVE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
"""share of the time with a kernel, which newer exporters have instead of DCGM_FI_DEV_GPU_UTIL"""
_POWER, _HEAT = 0x4, 0x8 | 0x20 | 0x40
"""bits of the reasons: software power cap; hardware slowdown, software and hardware thermal slowdown (dcgm_fields.h)"""


def is_dcgm_page(page: Page) -> bool:
    return any(name.startswith(PREFIX) for name in page.samples)


def read_dcgm_page(page: Page, source: str, earlier: Page | None = None, notes: tuple[str, ...] = ()) -> Reading:
    """Every device at every scrape."""
    scrapes: Sequence[Page] = (page,) if earlier is None else (earlier, page)
    rows = [row for scrape in scrapes for row in _rows(scrape)]
    return reading_of_devices(rows, source, by="dcgm", notes=notes)


def _rows(page: Page) -> Iterator[dict[str, float]]:
    """One record per device of any host; devices are numbered in the order of (host, gpu)."""
    by_device: dict[tuple[str, str], dict[str, float]] = {}
    for name, samples in page.samples.items():
        for sample in samples:
            if not name.startswith(PREFIX) or "gpu" not in sample.labels or sample.labels.get("GPU_I_ID"):
                continue  # a part of a device has no clock of its own
            row = by_device.setdefault((sample.labels.get("Hostname", ""), sample.labels["gpu"].zfill(3)), {})
            row |= _quantities(name, sample.value)
    for number, device in enumerate(sorted(by_device)):
        yield {"device": float(number), **by_device[device]}


def _quantities(name: str, value: float) -> dict[str, float]:
    if name in _REASONS:
        reasons = int(value)
        return {"hot": float(bool(reasons & _HEAT)), "capped": float(bool(reasons & _POWER))}
    if name == _ENGINE_ACTIVE:
        return {"busy_percent": 100 * value}
    quantity = COLUMNS.get(name.lower())
    return {quantity: value} if quantity else {}
