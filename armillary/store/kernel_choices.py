"""Choices: which version of a kernel was found fastest on a device, kept in choices/DEVICE.json with the proof.

A record is what `kernels.choose` found for one key (operation, case, library versions); it is used only on the device
it was found on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.errors import BadData
from armillary.store import strict_json
from armillary.store.atomic import write_json
from armillary.store.home import Home
from armillary.store.lock import locked

Record = Mapping[str, Any]


def load_choice(home: Home, device: str, key: str) -> Record | None:
    """What was found for `key` on exactly this device, or None."""
    return load_choices(home, device).get(key)


def load_choices(home: Home, device: str) -> dict[str, Record]:
    """Everything that was found on this device."""
    path = choices_path(home, device)
    if not path.is_file():
        return {}
    table = strict_json.read_table(path)
    records = table.get("choices")
    if not isinstance(table.get("device"), str) or not isinstance(records, dict):
        raise BadData(f"{path} lacks device or choices; delete it, and kernels will be tried again")
    return records if table["device"] == device else {}


def save_choice(home: Home, device: str, key: str, record: Record) -> None:
    """Keep it beside those already known of the device; a newer one of the same key replaces it."""
    path = choices_path(home, device)
    with locked(path.with_name(f".{path.name}.lock")):
        known = load_choices(home, device)
        write_json(path, {"device": device, "choices": {**known, key: dict(record)}})


def forget_choices(home: Home, device: str) -> None:
    """Start anew on this device."""
    choices_path(home, device).unlink(missing_ok=True)


def choices_path(home: Home, device: str) -> Path:
    """'NVIDIA H200' -> choices/nvidia-h200.json."""
    return home.choices / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
