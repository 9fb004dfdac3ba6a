"""CSV of `nvidia-smi --query-gpu=… --format=csv -l 1`, or with the names of DCGM's fields, as a Reading of the devices.

Each row is one device at one moment. Columns are found by their names, units and order do not matter.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from armillary.diagnosis.readings.log_lines import number
from armillary.diagnosis.readings.reading import Reading

COLUMNS = {
    "clocks.current.sm": "sm_clock",
    "clocks.sm": "sm_clock",
    "dcgm_fi_dev_sm_clock": "sm_clock",
    "clocks.max.sm": "sm_clock_max",
    "power.draw": "power_w",
    "dcgm_fi_dev_power_usage": "power_w",
    "power.limit": "power_limit_w",
    "enforced.power.limit": "power_limit_w",
    "dcgm_fi_dev_power_mgmt_limit": "power_limit_w",
    "temperature.gpu": "temperature",
    "dcgm_fi_dev_gpu_temp": "temperature",
    "utilization.gpu": "busy_percent",
    "dcgm_fi_dev_gpu_util": "busy_percent",
    "memory.used": "memory_mib",
    "dcgm_fi_dev_fb_used": "memory_mib",
}
"""name of a column without its unit -> quantity"""
_UNIT = re.compile(r"\s*\[.*\]$")
_HEAT = re.compile(r"(?:thermal_slowdown|hw_slowdown|sw_thermal)")


def is_device_csv(text: str) -> bool:
    """Whether the first line names at least two known columns."""
    first = text.lstrip("\ufeff").split("\n", 1)[0]
    names = [_name(cell) for cell in first.split(",")]
    return sum(name in COLUMNS for name in names) >= 2


def read_device_csv(text: str, source: str) -> Reading:
    """One record per row."""
    rows = [_record(row) for row in csv.DictReader(io.StringIO(text.lstrip("\ufeff")))]
    return reading_of_devices(rows, source, by="nvidia-smi")


def reading_of_devices(
    rows: Sequence[Mapping[str, float]], source: str, *, by: str, notes: tuple[str, ...] = ()
) -> Reading:
    """Records of devices as what matters of the whole: the slowest device's clock while it worked, and its cause."""
    values: dict[str, float] = {}
    working = [row for row in rows if row.get("busy_percent", 100.0) >= 50.0 and "sm_clock" in row]
    most = max((row.get("sm_clock_max", row["sm_clock"]) for row in working), default=0.0)
    if working and most:
        by_device = {row["device"]: [r["sm_clock"] for r in working if r["device"] == row["device"]] for row in working}
        slowest = min(by_device, key=lambda device: fmean(by_device[device]))
        own = [row for row in working if row["device"] == slowest]
        values |= {
            "slowest_device": slowest,
            "clock_fraction": fmean(by_device[slowest]) / most,
            "hot_fraction": fmean(row.get("hot", 0.0) for row in own),
            "at_power_limit_fraction": fmean(float(_is_capped(row)) for row in own),
        }
        if heats := [row["temperature"] for row in own if "temperature" in row]:
            values["temperature"] = max(heats)
    if busy := [row["busy_percent"] for row in rows if "busy_percent" in row]:
        values["device_busy_fraction"] = fmean(busy) / 100
    return Reading(source=source, kind="profile", by=by, values=values, notes=notes)


def _is_capped(row: Mapping[str, float]) -> bool:
    return bool(row.get("capped")) or row.get("power_w", 0.0) >= 0.97 * row.get("power_limit_w", float("inf"))


def _record(row: dict[str, str]) -> dict[str, float]:
    record = {"device": 0.0}
    for column, cell in row.items():
        name = _name(column or "")
        value = number((cell or "").strip().split(" ")[0])
        if name in COLUMNS and value is not None:
            record[COLUMNS[name]] = value
        elif name in ("index", "gpu") and value is not None:
            record["device"] = value
        elif _HEAT.search(name) and (cell or "").strip().lower() in ("active", "1"):
            record["hot"] = 1.0
    return record


def _name(column: str) -> str:
    return _UNIT.sub("", column).strip().lower()
