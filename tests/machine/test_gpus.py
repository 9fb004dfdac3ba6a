"""Accelerators, from recorded words of the driver tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.machine import gpus
from armillary.machine.gpus import parse_amd, parse_nvidia, parse_topology

H200 = "NVIDIA H200, 143771, 570.133.20, 5, 16, 9.0\n"

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-55\t0\t\tN/A
GPU2\tSYS\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_nvidia() -> None:
    (gpu,) = parse_nvidia(H200)
    assert (gpu.name, gpu.vendor, gpu.driver, gpu.capability) == ("NVIDIA H200", "NVIDIA", "570.133.20", "9.0")
    assert gpu.memory_bytes == 143_771 * 2**20
    assert (gpu.pcie_generation, gpu.pcie_lanes) == (5, 16)


def test_what_the_driver_does_not_say_stays_unknown() -> None:
    (gpu,) = parse_nvidia("NVIDIA GB10, [N/A], 580.0, [N/A], [N/A], [N/A]\n")
    assert (gpu.memory_bytes, gpu.pcie_generation, gpu.pcie_lanes, gpu.capability) == (None, None, None, "")


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA-SMI has failed, because, of something\n"])
def test_no_gpu(text: str) -> None:
    assert parse_nvidia(text) == ()


def test_topology_is_the_upper_triangle_of_the_gpus() -> None:
    assert parse_topology(TOPOLOGY) == {"0-1": "NV18", "0-2": "SYS", "1-2": "NV18"}


def test_amd() -> None:
    cards = {
        "card0": {
            "Card Series": "AMD Instinct MI300X OAM",
            "GFX Version": "gfx942",
            "VRAM Total Memory (B)": "206141652992",
        },
        "system": {"Driver version": "6.10.5"},
    }
    (gpu,) = parse_amd(json.dumps(cards))
    assert (gpu.name, gpu.vendor, gpu.driver, gpu.capability) == ("AMD Instinct MI300X OAM", "AMD", "6.10.5", "gfx942")
    assert gpu.memory_bytes == 206_141_652_992
    assert parse_amd("") == parse_amd("not json") == ()


@pytest.mark.parametrize(("script", "found"), [(f"printf '{H200.strip()}'", 1), ("exit 9", 0), ("exec sleep 60", 0)])
def test_the_driver_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: int) -> None:
    """A tool that answers, one that fails, one that hangs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "_TIMEOUT_S", 0.5)
    assert len(gpus.gpus()) == found
