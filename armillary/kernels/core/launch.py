"""What every Triton launch needs: the right device, the size of a persistent grid, powers of two."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from armillary.machine.accelerator import accelerator_of

INTERPRETED_PROGRAMS = 3
"""a grid for the interpreter on a CPU: more than one, so that sums over programs are tested"""


def is_bare(x: Tensor) -> bool:
    """Whether kernels may be launched past torch's dispatcher, which takes longer on the host than the launch does:
    nothing wants gradients, traces, records, or stands in for real tensors."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return type(x) is Tensor and not torch._C._len_torch_dispatch_stack() and not torch.autograd._profiler_enabled()


def on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def num_programs(x: Tensor, per_multiprocessor: int) -> int:
    """Programs that all run at once."""
    chip = accelerator_of(x.device)
    return INTERPRETED_PROGRAMS if chip is None else chip.multiprocessors * per_multiprocessor


def fitting_stages(x: Tensor, bytes_a_stage: int, stages: int) -> int:
    """As many of `stages` as shared memory holds: what is loaded ahead waits there, but for one stage in registers."""
    chip = accelerator_of(x.device)
    if chip is None:
        return stages
    return max(1, min(stages, 1 + int(0.9 * chip.shared_bytes) // max(1, bytes_a_stage)))


@cache
def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may be set up while the one ahead still runs (programmatic dependent launch)."""
    chip = accelerator_of(device)
    return chip is not None and chip.early_launch


@cache
def side_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for kernels that run beside those of `stream`: of its own, so that what is captured there stays apart."""
    return torch.cuda.Stream(stream.device)


def register_limit(device: torch.device, registers: int | None) -> dict[str, Any]:
    """The launch option that leaves a multiprocessor's other registers to programs of other kernels."""
    chip = accelerator_of(device)
    return {} if registers is None or chip is None or chip.vendor != "nvidia" else {"maxnreg": registers}


def early_launch(early: bool) -> dict[str, Any]:
    """The launch option for it; such a kernel waits (`gdc_wait`) before it reads what the one ahead writes."""
    return {"launch_pdl": True} if early else {}


def power_of_two(count: int) -> int:
    """The next one at or above; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def as_rows(x: Tensor) -> Tensor:
    """[…, N] as [rows, N] with neighbours adjacent, a view where strides allow it."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows if rows.stride(1) == 1 else rows.contiguous()


def dense(x: Tensor | None) -> Tensor | None:
    """A small vector or table, if there is one, with neighbours adjacent: kernels read it without strides."""
    return None if x is None else x.contiguous()
