"""What this process uses, as the operating system or the allocator counts it, and how each gauge is measured."""

from collections.abc import Mapping

import torch

from armillary.machine.memory import peak_resident_bytes, resident_bytes
from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.arithmetic.params import parameters
from armillary.spec.lora import adapter_weights
from armillary.spec.plan import Plan

SOURCES = {
    "loss": "model",
    "val_loss": "model",
    "grad_norm": "model",
    "lr": "schedule",
    "tokens_total": "count",
    "loss_scale": "scaler",
    "skipped_steps_total": "scaler",
    "mfu": "wall clock and the chip's dense peak",
    "host_memory_bytes": "operating system",
    "checkpoint_bytes": "file sizes",
    "checkpoints_total": "count",
    "restarts_total": "count",
    "failures_total": "count",
    "aux_loss": "model",
    "expert_load_max_over_mean": "count",
    "expert_tail_fraction": "count",
    "expert_drop_fraction": "count",
    "router_entropy": "model",
    "offloaded_bytes": "count",
    "host_cpu_s": "the thread's clock",
    "host_queue_s": "operating system",
    "torch_call_s": "the thread's clock",
    "micro_batch_overhead_fraction": "the thread's clock",
    "slowest_rank": "every rank's own clock",
    "rank_spread_s": "every rank's own clock",
}
"""how gauges are measured; those of memory say it themselves, the rest are differences of the wall clock"""
PROFILER = "profiler window"


def memory_gauges(device: torch.device) -> dict[str, float]:
    """Now and most so far: the allocator's on a GPU; on a CPU, whose memory is the host's, the process's."""
    host = {"host_memory_bytes": peak_resident_bytes()}
    if device.type != "cuda":
        return host | {"memory_bytes": resident_bytes(), "memory_peak_bytes": peak_resident_bytes()}
    return host | {
        "memory_bytes": float(torch.cuda.memory_allocated(device)),
        "memory_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        "memory_reserved_bytes": float(torch.cuda.memory_reserved(device)),
    }


def source_of(gauges: Mapping[str, float], own: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """gauge -> how it was measured; `own` are those that a step measured in another way than usual."""
    memory = "allocator" if device.type == "cuda" else "operating system"
    return {
        name: own.get(name) or SOURCES.get(name) or (memory if name.startswith("memory_") else "wall clock")
        for name in gauges
    }


class Throughput:
    """Of one run: `gauges(seconds)` of a step."""

    def __init__(self, plan: Plan) -> None:
        assert plan.train is not None
        self._tokens, self._devices = plan.train.batch_tokens, plan.layout.num_devices
        self._flops = _flops_per_token(plan)
        chip = plan.cluster.chip
        self._peak = chip.flops.get("bf16") if chip.kind != "cpu" else None

    def gauges(self, seconds: float, data_wait_s: float) -> dict[str, float]:
        """MFU only where the chip's peak is known: by convention its dense 16-bit peak, for every precision."""
        rate = self._tokens / seconds
        each = rate / self._devices
        gauges = {
            "step_s": seconds,
            "data_wait_s": data_wait_s,
            "data_wait_fraction": min(1.0, data_wait_s / seconds),
            "tokens_per_s": rate,
            "tokens_per_s_per_device": each,
        }
        return gauges | {"mfu": each * self._flops / self._peak} if self._peak else gauges


def _flops_per_token(plan: Plan) -> float:
    """By the MFU convention: weights that LoRA freezes count 4 instead of 6, its adapters 6."""
    job = plan.train
    assert job is not None
    if not job.lora_rank:
        return model_flops_per_token(plan.model, job.sequence)
    adapters = adapter_weights(plan.model, rank=job.lora_rank, on=job.lora_on)
    frozen = parameters(plan.model).multiplied
    return model_flops_per_token(plan.model, job.sequence, frozen=frozen, adapters=adapters)
