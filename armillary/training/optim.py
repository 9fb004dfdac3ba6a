"""AdamW and its learning rate: one function of the step, written down once.

Weight decay acts on matrices only; norms, biases and sinks are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from armillary.spec.job import TrainJob


def make_optimizer(model: nn.Module, job: TrainJob) -> torch.optim.AdamW:
    """Fused AdamW over the parameters that train, decayed and not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": job.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=job.betas, eps=job.eps, fused=True
    )


def learning_rate(job: TrainJob, step: int, num_parameters: int) -> float:
    """Linear warm-up to the peak, then the schedule down to the final rate at the last step."""
    peak, final = job.peak_lr(num_parameters), job.final_lr(num_parameters)
    if step < job.warmup:
        return peak * (step + 1) / job.warmup
    if job.schedule == "constant":
        return peak
    start = job.warmup
    if job.schedule == "wsd":
        start = max(start, job.steps - max(1, round(job.steps * job.decay_fraction)))
    progress = min(1.0, max(0.0, (step - start) / max(1, job.steps - 1 - start)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if job.schedule == "cosine" else 1 - progress
    return final + (peak - final) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
    """The gradients' norm before clipping; `limit` 0 only measures."""
    return nn.utils.clip_grad_norm_(parameters, limit or math.inf)
