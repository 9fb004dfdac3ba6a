"""A save while it is being written, and when it is committed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from armillary.training.checkpoint.staging import Copy


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was committed."""

    step: int
    folder: Path
    bytes: int  # of all its files
    seconds: float = 0.0  # from the request to the commit
    stall_s: float = 0.0  # part of it in which this rank did not train
    wait_s: float = 0.0  # part of the stall in which it waited for the save before
    delta_of: int | None = None  # step of the full checkpoint that this one needs
    saved_fraction: float = 0.0  # share of the bytes of a full one that the delta saves


@dataclass(kw_only=True)
class SaveInFlight:
    """A save that has begun."""

    step: int
    number: int
    about: dict[str, Any]
    random: dict[str, Tensor]
    copy: Copy
    began: float
    in_memory: bool = False
    stall_s: float = 0.0
    wait_s: float = 0.0
