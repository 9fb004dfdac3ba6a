"""Matmul precision and determinism of a run, set for its duration and restored after it."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b

import torch
from torch import Tensor


@contextmanager
def numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """fp32 GEMMs on tf32 units, and deterministic kernels only, as requested."""
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if tf32 else before[0])
    if deterministic:
        # cuBLAS reads this when its handle is made, and torch insists on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""precision -> dtype of GEMMs over fp32 weights; with fp8, of those that are not in fp8"""


def autocast(precision: str, device: torch.device, *, wanted: bool = True) -> AbstractContextManager[object]:
    """16-bit GEMMs over fp32 weights; nothing where weights are cast in another way."""
    half = HALF.get(precision)
    return torch.autocast(device.type, half) if half is not None and wanted else nullcontext()


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
