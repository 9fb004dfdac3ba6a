"""fp16 needs its loss scaled, so that small gradients do not vanish; a step whose gradients overflowed is skipped.

torch's GradScaler for gradients that are sharded over ranks: every rank checks its own part, and all skip
together (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.errors import ArmillaryError

SMALLEST = 2.0**-14
"""a scale below this cannot be the remedy: the loss itself is no number"""


class LossScaler(torch.amp.GradScaler):
    """`scale(loss).backward()`, `unscale_`, clip, `step`, `update`; disabled for every precision but fp16."""

    def __init__(self, device: torch.device, *, enabled: bool, many: bool = False) -> None:
        """`many` where other ranks hold other gradients."""
        super().__init__(device.type, enabled=enabled)
        self._many = many
        if enabled:
            self._lazy_init_scale_growth_tracker(device)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Of the local part of each gradient; whether any rank found an overflow is the maximum over all."""
        for grads in _local_gradients(optimizer).values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        if self._many:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    @property
    def factor(self) -> Tensor | None:
        """The scale, without waiting for the device; None where nothing is scaled."""
        return self._scale if self.is_enabled() else None


def _local_gradients(optimizer: torch.optim.Optimizer) -> dict[torch.dtype, list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                by_dtype.setdefault(local.dtype, []).append(local)
    return by_dtype


def refuse_tiny_scale(scale: float, step: int) -> None:
    """Overflow after overflow is no matter of scale."""
    if scale < SMALLEST:
        raise ArmillaryError(
            f"fp16 overflows at step {step} whatever the loss scale (now {scale:g}); "
            "try --set layout.precision=fp32, or bf16 where the device has units for it"
        )
