"""GPUs that are not here: torch answers as its drivers do for each of these chips."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armillary.machine.accelerator import accelerator_of

KB = 1024
CHIPS: dict[str, dict[str, Any]] = {
    "T4": {"major": 7, "minor": 5, "shared_memory_per_block_optin": 64 * KB},
    "A100": {"major": 8, "minor": 0, "shared_memory_per_block_optin": 163 * KB},
    "RTX 3090": {"major": 8, "minor": 6, "shared_memory_per_block_optin": 99 * KB},
    "L4": {"major": 8, "minor": 9, "shared_memory_per_block_optin": 99 * KB},
    "H200": {"major": 9, "minor": 0, "shared_memory_per_block_optin": 227 * KB},
    "B200": {"major": 10, "minor": 0, "shared_memory_per_block_optin": 227 * KB},
    "RTX 5090": {"major": 12, "minor": 0, "shared_memory_per_block_optin": 99 * KB},
    "MI300X": {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-", "shared_memory_per_block": 64 * KB},
}
"""what torch.cuda.get_device_properties says; an MI300X gives itself out for 9.4"""


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> torch.device:
    """Let torch see this chip as its only GPU."""
    chip = CHIPS[name]
    properties = SimpleNamespace(name=name, multi_processor_count=100, **chip)
    monkeypatch.setattr(torch.version, "hip", "6.4" if "gcnArchName" in chip else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (chip["major"], chip["minor"]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    accelerator_of.cache_clear()
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing of a pretended GPU outlives its test."""
    yield
    accelerator_of.cache_clear()
