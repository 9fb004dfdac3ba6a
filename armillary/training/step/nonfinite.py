"""Steps whose loss or gradients are not finite, and the fp16 loss scale that keeps small gradients from vanishing.

The device has skipped the update of such a step (optimizer.update). `train.on_nonfinite` says what follows: the run
stops, with the weights it had before that step, or continues with the next batch. fp16 always continues, with a
smaller loss scale (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2).
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.errors import ArmillaryError
from armillary.kernels.optimizer.adamw import AdamW
from armillary.parallel.consensus import Consensus, attempt
from armillary.spec.tables.train import TrainJob

MOST_IN_A_ROW = 10
"""steps skipped one after the other, beyond which no batch is to blame"""
SMALLEST_SCALE = 2.0**-14
"""a scale below this cannot be the remedy: the loss itself is no number"""


class LossScaler(torch.amp.GradScaler):
    """`scale(loss).backward()`, `unscale_`, clip, `step`, `update`; disabled for every precision but fp16. torch's
    GradScaler for gradients that are sharded over ranks: each checks its own part, and all skip together."""

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


class Nonfinite:
    """`check(step, values, local_loss)` after every step, on every rank: all have read the same loss and norm."""

    def __init__(self, job: TrainJob, ranks: Consensus, optimizer: torch.optim.Optimizer, num_parameters: int) -> None:
        self._job, self._ranks, self._optimizer, self._num_parameters = job, ranks, optimizer, num_parameters
        self.skipped = self._in_a_row = 0

    def check(self, step: int, values: Mapping[str, float], local_loss: Tensor) -> None:
        """Count a step that was not taken, or raise on all ranks where the run must not continue. `local_loss` is this
        rank's part of the loss, read only when a value is not finite."""
        _, error = attempt(lambda: self._check(step, values, local_loss))
        if error is not None:  # on all ranks, as all have read the same values
            self._ranks.raise_first(error)

    def _check(self, step: int, values: Mapping[str, float], local_loss: Tensor) -> None:
        name = next((name for name in ("loss", "grad_norm") if not math.isfinite(values[name])), None)
        if name is None:
            self._in_a_row = 0
            return
        if "loss_scale" in values:
            self.skipped += 1
            if values["loss_scale"] < SMALLEST_SCALE:
                raise ArmillaryError(
                    f"fp16 overflows at step {step} whatever the loss scale (now {values['loss_scale']:g}); "
                    "try --set layout.precision=fp32, or bf16 where the device has units for it"
                )
            return
        if isinstance(self._optimizer, AdamW):
            self._optimizer.uncount()
        where = self._where(local_loss)
        self._in_a_row += 1
        if self._job.on_nonfinite == "stop" or self._in_a_row >= MOST_IN_A_ROW:
            raise ArmillaryError(f"{name} is {values[name]} at step {step}{where}; {self._remedy(values['lr'])}")
        self.skipped += 1

    def _where(self, local_loss: Tensor) -> str:
        """Which ranks' own part of the loss is no number; nothing to say where all are, or there is one rank only."""
        if self._ranks.size == 1:
            return ""
        finite = self._ranks.gather(math.isfinite(float(local_loss)))
        bad = [str(rank) for rank, good in enumerate(finite) if not good]
        if not bad:
            return " (the loss of every rank is finite)"
        return f" on rank{'s' if len(bad) > 1 else ''} {', '.join(bad)}"

    def _remedy(self, lr: float) -> str:
        lower = min(lr / 3, replace(self._job, lr=None).peak_lr(self._num_parameters))
        skipped = f"{self._in_a_row} steps in a row were skipped" if self._in_a_row > 1 else "the step was not taken"
        more = "" if self._job.on_nonfinite == "skip" else " or train.on_nonfinite=skip"
        return f"{skipped} and the weights are as before it: try --set train.lr={lower:.1g}{more}"
