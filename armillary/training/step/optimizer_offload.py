"""The optimizer of a run: on the device, or on the host with optimizer offload, overlapped with the next step."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.moe.experts import Experts
from armillary.parallel.apply import Sharded
from armillary.parallel.timers import ExposedWaits
from armillary.spec.tables.train import TrainJob
from armillary.training.step.host_adamw import HostAdamW
from armillary.training.step.optimizer import make_optimizer, parameter_groups

OPTIMIZER_OUT = ("optimizer", "both", "nvme")
"""values of layout.offload with which the optimizer states leave the device"""


def optimizer_of(
    sharded: Sharded, job: TrainJob, *, weights_16bit: Weights16Bit | None = None, folder: Path | None = None
) -> torch.optim.AdamW:
    """`weights_16bit` are the copies for GEMMs; `folder` is on the disk for offload=nvme."""
    layout, model, device = sharded.layout, sharded.model, sharded.mesh.world.device
    if layout.offload not in OPTIMIZER_OUT:
        return make_optimizer(model, job, layout.precision, None if weights_16bit is None else weights_16bit.copies)
    assert layout.offload != "nvme" or folder is not None, "a folder for the states"
    optimizer = HostAdamW(
        model,
        parameter_groups(model, job.weight_decay),
        device=device,
        lr=0.0,
        betas=job.betas,
        eps=job.eps,
        folder=folder if layout.offload == "nvme" else None,
    )
    if weights_16bit is not None and layout.precision == "bf16" and layout.num_devices == 1 and not job.lora_rank:
        narrow(model, weights_16bit, summed=layout.num_micro_batches(job.batch_tokens, job.sequence) > 1)
    if device.type == "cuda" and sharded.pipeline is None and not sharded.is_fsdp and not job.compiled:
        optimizer.overlap_with(model)
    return optimizer


class Offloaded:
    """What a run offloads to the host, and how long its steps wait for it."""

    def __init__(self, sharded: Sharded, optimizer: torch.optim.Optimizer) -> None:
        self._activations = sharded.activations
        self._optimizer = optimizer if isinstance(optimizer, HostAdamW) else None
        self._timer = _CopyWaits(sharded.mesh.world.device)
        for part in (self._activations, self._optimizer):
            if part is not None:
                part.timer = self._timer

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor of a CPU is elsewhere than on its "device"."""
        parts = (self._activations, self._optimizer)
        return any(part is not None and part.memory.holds(tensor) for part in parts)

    def gauges(self) -> dict[str, float]:
        """Since they were last asked; none where nothing is offloaded."""
        if self._activations is None and self._optimizer is None:
            return {}
        size = self._activations.memory.peak if self._activations is not None else 0
        size += self._optimizer.host_bytes if self._optimizer is not None else 0
        return {"offload_s": self._timer.take(), "offloaded_bytes": float(size)}

    def finish(self) -> None:
        """Wait for the last step."""
        if self._optimizer is not None:
            self._optimizer.finish()


class _CopyWaits(ExposedWaits):
    """Copies outlast the steps that started them: those that have not ended are counted with the next step."""

    def take(self) -> float:
        ended = [span for span in self._spans if not self._timer.on_gpu or span[1].query()]
        later = self._spans[len(ended) :]
        self._spans = ended
        seconds = super().take()
        self._spans = later
        return seconds


def narrow(model: nn.Module, weights_16bit: Weights16Bit, *, summed: bool) -> None:
    """Keep the weights of GEMMs in the dtype of the GEMMs only: their fp32 form is on the host.
    Gradients that are summed over micro-batches are summed in fp32 as before."""
    for weight in matrices(model):
        if weight.requires_grad and hasattr(weight, "grad_dtype"):
            weight.data = weight.data.to(weights_16bit.dtype)
            weight.grad_dtype = torch.float32 if summed else weights_16bit.dtype
            weights_16bit.copies.pop(weight, None)


def widen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give narrowed weights their fp32 form back, when the training is over."""
    if not isinstance(optimizer, HostAdamW):
        return
    optimizer.finish()
    for weight in matrices(model):
        if weight in optimizer.state and weight.dtype != torch.float32:
            weight.grad = None
            weight.data = optimizer.weight(weight).to(weight.device)


def matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights of GEMMs."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module.weight
        elif isinstance(module, Experts):
            yield from (module.up_E2FH, module.down_EHF)
