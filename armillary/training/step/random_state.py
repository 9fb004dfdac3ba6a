"""The random state of one rank: the host's generator and its device's."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


def seed(number: int, rank: int, step: int = 0) -> None:
    """Start a run's random numbers (dropout), other ones on each rank. A run that goes on has its own back later, or on
    another number of ranks begins with those of its `step`, so that none come twice."""
    mixed = blake2b(f"{number} {rank} {step}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(mixed) if step else number * 65_537 + rank)


def random_state() -> dict[str, Tensor]:
    state = {"host": torch.get_rng_state()}
    return state | {"device": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["host"])
    if "device" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["device"])
