"""Pages of dcgm-exporter, made by hand from its default counters: which device is held down, by what, which idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.readings.metrics_page import reading_of_page
from armillary.store.home import Home

Cli = Callable[..., Any]
POWER_CAP, HW_THERMAL = 0x4, 0x40


def page(*, clock: int = 1900, reasons: int = 0, busy: float = 99, active: float | None = None) -> str:
    """Two devices each on two hosts, of which the last differs; nothing of a part of a device counts."""
    lines = ["# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).", "# TYPE DCGM_FI_DEV_SM_CLOCK gauge"]
    for number, (host, gpu) in enumerate((host, gpu) for host in ("a", "b") for gpu in (0, 1)):
        labels, last = f'{{gpu="{gpu}",UUID="GPU-{number}",modelName="NVIDIA H100",Hostname="{host}"}}', number == 3
        lines += [
            f"DCGM_FI_DEV_SM_CLOCK{labels} {clock if last else 1900}",
            f"DCGM_FI_DEV_GPU_TEMP{labels} {88 if last else 60}",
            f"DCGM_FI_DEV_POWER_USAGE{labels} 650.5",
            f"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{labels} {reasons if last else 0}",
        ]
        used = "DCGM_FI_DEV_GPU_UTIL" if active is None else "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
        lines.append(f"{used}{labels} {busy if active is None else active}")
    part = 'DCGM_FI_DEV_SM_CLOCK{gpu="1",GPU_I_ID="3",Hostname="b"} 100'
    return "\n".join([*lines, part]) + "\n"


@pytest.mark.parametrize(("reasons", "why"), [(HW_THERMAL, "is hot"), (POWER_CAP, "at its power limit")])
def test_what_holds_the_slowest_device_down(home: Home, reasons: int, why: str) -> None:
    verdict = diagnose(reading_of_page(page(clock=1300, reasons=reasons), source="page"), home)
    assert (verdict.loop, verdict.cause) == ("inner", "throttling") and why in verdict.headline
    assert "device 3 works at 68%" in verdict.headline


def test_slow_without_a_reason_or_at_full_clock_is_not_throttling(home: Home) -> None:
    for text in (page(clock=1300), page(reasons=0)):
        assert diagnose(reading_of_page(text, source="page"), home).cause != "throttling"


def test_idle_devices_by_either_counter_over_two_looks(home: Home) -> None:
    for given in ({"busy": 60}, {"active": 0.6}):
        reading = reading_of_page(page(**given), source="page", earlier=page(**given), seconds=5.0)
        assert (
            reading.values["device_busy_fraction"] == pytest.approx(0.6)
            and "looked at twice, 5 s apart" in reading.notes
        )
        assert diagnose(reading, home).cause == "idle_device"


def test_a_saved_page_on_the_command_line(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "gpus.txt"
    file.write_text(page(clock=1300, reasons=HW_THERMAL))
    assert "throttling" in cli("diagnose", str(file), "-q").out
