"""What this process uses, as the operating system or the allocator counts it, and how each gauge is measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from armillary.machine.process import peak_resident_bytes, resident_bytes

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
    "aux_loss": "model",
    "expert_load_max_over_mean": "count",
    "expert_tail_fraction": "count",
    "expert_drop_fraction": "count",
    "router_entropy": "model",
    "offloaded_bytes": "count",
    "host_cpu_s": "the thread's clock",
    "host_queue_s": "operating system",
    "call_s": "the thread's clock",
    "micro_batch_fraction": "the thread's clock",
    "slowest_rank": "every rank's own clock",
    "rank_spread_s": "every rank's own clock",
}
"""how gauges are measured; those of memory say it themselves, the rest are differences of the wall clock"""
WINDOW = "profiler window"


def memory_gauges(device: torch.device) -> dict[str, float]:
    """Now and most so far: the allocator's on a GPU; on a CPU, whose memory is the host's, the whole process's."""
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
