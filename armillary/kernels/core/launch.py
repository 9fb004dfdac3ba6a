"""Helpers for Triton launches: the current device, grid sizes, tiles that fit shared memory, launch options."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from armillary.machine.accelerator import accelerator_of

T = TypeVar("T")
INTERPRETED_PROGRAMS = 3  # grid size for the interpreter on a CPU: more than one, so that sums over programs are tested


def is_bare(x: Tensor) -> bool:
    """Whether kernels may be launched without torch's dispatcher, which costs the CPU more than the launch itself: no
    gradients, no tracing, no profiler, no tensor subclass."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return type(x) is Tensor and not torch._C._len_torch_dispatch_stack() and not torch.autograd._profiler_enabled()


def on(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, which is where Triton launches."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def num_programs(x: Tensor, per_multiprocessor: int) -> int:
    """Programs of a persistent grid, all resident at once."""
    chip = accelerator_of(x.device)
    return INTERPRETED_PROGRAMS if chip is None else chip.multiprocessors * per_multiprocessor


def fitting_stages(x: Tensor, bytes_per_stage: int, stages: int) -> int:
    """As many of `stages` as shared memory holds: one stage is in registers, the others are in shared memory."""
    chip = accelerator_of(x.device)
    if chip is None:
        return stages
    return max(1, min(stages, 1 + int(0.9 * chip.shared_bytes) // max(1, bytes_per_stage)))


def first_fitting(device: torch.device, tiles: Sequence[T], shared_bytes: Callable[[T], int]) -> T:
    """The first of `tiles` (best first) that fits the shared memory of a block; the last and smallest where none fits.
    On a CPU, where the interpreter runs kernels, the first."""
    chip = accelerator_of(device)
    if chip is None:
        return tiles[0]
    return next((tile for tile in tiles if shared_bytes(tile) <= chip.shared_bytes), tiles[-1])


@cache
def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may start while the previous one still runs (programmatic dependent launch)."""
    chip = accelerator_of(device)
    return chip is not None and chip.early_launch


def early_launch(early: bool) -> dict[str, Any]:
    """The launch option for an early start; such a kernel calls `gdc_wait` before it reads what the previous one
    writes."""
    return {"launch_pdl": True} if early else {}


@cache
def side_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream for kernels that run beside those of `stream`; one per stream, so that graph captures stay separate."""
    return torch.cuda.Stream(stream.device)


def register_limit(device: torch.device, registers: int | None) -> dict[str, Any]:
    """The launch option that leaves a multiprocessor's other registers to programs of other kernels."""
    chip = accelerator_of(device)
    return {} if registers is None or chip is None or chip.vendor != "nvidia" else {"maxnreg": registers}


def power_of_two(count: int) -> int:
    """The smallest power of two at or above `count`; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def as_rows(x: Tensor) -> Tensor:
    """[…, N] as [rows, N] with unit stride in the last dim, a view where strides allow it."""
    return unit_stride(x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x)


def unit_stride(x: Tensor) -> Tensor:
    """The same tensor, or a contiguous copy where elements of the last dim are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor | None) -> Tensor | None:
    """A small vector or table, contiguous: kernels read it without strides."""
    return None if x is None else x.contiguous()
