"""The random state of one rank: the host's generator and its device's."""

from __future__ import annotations

import torch
from torch import Tensor


def seed(number: int, rank: int) -> None:
    """Start a run's random numbers (dropout), other ones on each rank; a resumed run has its own back later."""
    torch.manual_seed(number * 65_537 + rank)


def random_state() -> dict[str, Tensor]:
    state = {"host": torch.get_rng_state()}
    return state | {"device": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["host"])
    if "device" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["device"])
