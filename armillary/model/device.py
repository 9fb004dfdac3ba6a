"""Which device to run on, from what a person asked for and what is there."""

from __future__ import annotations

import torch

from armillary.errors import BadInput


def pick_device(asked: str | None = None) -> torch.device:
    """The device asked for, or the best there is."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise BadInput(f"device '{asked}' is not known; try cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"there is no {asked} on this machine; armillary doctor says why, or use --device cpu")
    return device
