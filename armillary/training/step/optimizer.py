"""AdamW and its learning-rate schedule.

Weight decay acts on matrices only; norms, biases and sinks are left alone.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armillary.kernels.optimizer import adamw
from armillary.parallel.apply import Sharded
from armillary.spec.tables.train import TrainJob
from armillary.training.step.host_adamw import HostAdamW
from armillary.training.step.nonfinite import LossScaler


def make_optimizer(
    model: nn.Module, job: TrainJob, precision: str = "fp32", copies: Mapping[Tensor, Tensor] | None = None
) -> torch.optim.AdamW:
    """AdamW in one pass over the parameters that train, decayed and not: our kernel on a GPU, which also writes the
    half-precision `copies`, else torch's fused one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(model, job.weight_decay)
    if precision != "fp16" and adamw.takes(trained):  # a loss scaler needs torch's
        return adamw.AdamW(groups, copies=copies, lr=0.0, betas=job.betas, eps=job.eps)
    return torch.optim.AdamW(groups, lr=0.0, betas=job.betas, eps=job.eps, fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decayed and not; parameters on different meshes (experts and others) go through different passes."""
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            decays = parameter.ndim >= 2 and "bias" not in name
            groups.setdefault((decays, mesh), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def learning_rate(job: TrainJob, step: int, num_parameters: int) -> float:
    """Linear warm-up to the peak, then the schedule down to the final rate at the last step. What falls from its first
    step (cosine, linear) has the peak there; wsd's first step of falling is below it already."""
    peak, final = job.peak_lr(num_parameters), job.final_lr(num_parameters)
    if step < job.warmup:
        return peak * (step + 1) / job.warmup
    if job.schedule == "constant":
        return peak
    start = job.warmup
    if job.schedule == "wsd":
        start = max(start, job.steps - max(1, round(job.steps * job.decay_fraction))) - 1
    span = job.steps - 1 - start
    progress = min(1.0, max(0.0, (step - start) / span)) if span > 0 else 1.0
    left = 0.5 * (1 + math.cos(math.pi * progress)) if job.schedule == "cosine" else 1 - progress
    return final + (peak - final) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def update(
    sharded: Sharded,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    limit: float,
    known: Callable[[Tensor], None] = lambda norm: None,
    loss: Tensor | None = None,
) -> Tensor:
    """Clip, step, free the gradients; returns their norm before clipping, and passes it to `known` once it is final.
    Nothing here waits for the device. A step whose gradients (or `loss`, the mean over all ranks) are not finite leaves
    weights and states as they are, decided on the device: the norm is not finite where any gradient of any rank is not,
    and it is the same on all of them."""
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    fused = isinstance(optimizer, adamw.AdamW)
    if fused or (isinstance(optimizer, HostAdamW) and not scaler.is_enabled()):  # they clip gradients on their way
        norm = sharded.norm_of_all(adamw.gradient_norm(sharded.model.parameters())) if fused else sharded.clip(0.0)
        known(norm)
        scale = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else None
        optimizer.step(scale=scale, check=norm if loss is None else norm + loss)  # type: ignore[call-arg]
        optimizer.zero_grad()
        return norm
    norm = sharded.clip(limit)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        _checked_step(optimizer, norm if loss is None else norm + loss)
    known(norm)
    optimizer.zero_grad()
    return norm


def _checked_step(optimizer: torch.optim.Optimizer, check: Tensor) -> None:
    """torch's fused AdamW, which leaves everything as it is where `found_inf` is 1."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = (check - check).ne(0).to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def weights_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, called: Callable[[str], str] = str
) -> dict[str, Tensor]:
    """The parameters that train, wherever their fp32 form is, under their names in the full model."""
    on_host = isinstance(optimizer, HostAdamW)
    return {
        called(name): optimizer.weight(parameter) if on_host else parameter.detach()  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def states_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, called: Callable[[str], str] = str
) -> dict[str, Tensor]:
    """AdamW's states under the names of their parameters (`called` in the full model), created where there are none,
    for checkpoints."""
    names = {parameter: called(name) for name, parameter in model.named_parameters()}
    states: dict[str, Tensor] = {}
    if isinstance(optimizer, HostAdamW):
        optimizer.finish()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter] or _first_state(optimizer, parameter, on_device=bool(group.get("fused")))
            states |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return states


def _first_state(optimizer: torch.optim.Optimizer, parameter: Tensor, *, on_device: bool) -> dict[str, Tensor]:
    """What AdamW itself makes at its first step."""
    count = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": count} | zeros
    return optimizer.state[parameter]
