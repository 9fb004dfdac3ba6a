"""Kernel choices: the fastest version of a kernel on a device, with its measurements, in choices/DEVICE.json.

A record is the result of `kernels.choose` for one key (operation, case, library versions); it holds for its device
only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.errors import BadData
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json
from armillary.store.home import Home
from armillary.store.lock import locked

Record = Mapping[str, Any]


def load_choice(home: Home, device: str, key: str) -> Record | None:
    """The record of `key` on this device, or None."""
    return load_choices(home, device).get(key)


def load_choices(home: Home, device: str) -> dict[str, Record]:
    """All records of this device."""
    path = choices_path(home, device)
    if not path.is_file():
        return {}
    table = nan_safe_json.read_table(path)
    records = table.get("choices")
    if not isinstance(table.get("device"), str) or not isinstance(records, dict):
        raise BadData(f"{path} lacks device or choices; delete it, and kernels are measured again")
    return records if table["device"] == device else {}


def save_choice(home: Home, device: str, key: str, record: Record) -> None:
    """Add a record to those of the device; it replaces an older one of the same key."""
    path = choices_path(home, device)
    with locked(path.with_name(f".{path.name}.lock")):
        known = load_choices(home, device)
        write_json(path, {"device": device, "choices": {**known, key: dict(record)}})


def choices_path(home: Home, device: str) -> Path:
    """'NVIDIA H200' -> choices/nvidia-h200.json."""
    return home.device_file(home.choices, device)
