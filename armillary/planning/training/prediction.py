"""Prediction: time and memory of layouts together, and one of them as gauges.

MFU counts 6·N FLOPs a token and causal attention as half, over the chip's dense 16-bit peak whatever the products run
in; HFU counts what is recomputed too (spec.mfu).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.planning.device_model.layout_arrays import PRECISIONS, RECOMPUTES, Array, Bools, Ints, Layouts, taken
from armillary.planning.training.memory_breakdown import Memory, fits, memory
from armillary.planning.training.step_time import StepTime, step_time
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.mfu import hardware_flops_per_token, model_flops_per_token
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Layouts with what was predicted for them."""

    case: TrainCase
    """what is trained, on what"""
    layouts: Layouts
    """priced side by side"""
    time: StepTime
    """seconds a step"""
    memory: Memory
    """bytes on the fullest device"""

    @property
    def fits(self) -> Bools:
        return fits(self.case, self.layouts, self.memory)

    @property
    def room(self) -> float:
        """Bytes of one device; endless where that is not known."""
        return self.case.cluster.chip.memory_bytes or float("inf")

    @property
    def tokens_per_s(self) -> Array:
        return self.case.batch_tokens / self.time.total

    @property
    def mfu(self) -> Array:
        rate = self.tokens_per_s * self.model_flops / self.layouts.num_devices
        share: Array = rate / self.case.curves.usual_peak
        return share

    @property
    def model_flops(self) -> float:
        """FLOPs a token by the MFU convention."""
        return model_flops_per_token(self.case.model, self.case.sequence, **self._adapters())

    def _adapters(self) -> dict[str, int]:
        """Frozen weights and trained adapters, as the FLOPs conventions count them."""
        lora = self.case.lora
        return {"frozen": parameters(self.case.model).multiplied, "adapters": lora.parameters} if lora else {}

    def hfu(self, i: int = 0) -> float:
        """FLOPs done over the dense 16-bit peak, for one layout."""
        code, every = int(self.layouts.recompute[i]), int(self.layouts.recompute_every[i])
        done = hardware_flops_per_token(
            self.case.model,
            self.case.sequence,
            recompute=RECOMPUTES[code],  # type: ignore[arg-type]
            recompute_every=every,
            flash=self.case.flash,
            **self._adapters(),
        )
        return float(self.mfu[i]) * done / self.model_flops

    def layout(self, i: int = 0) -> Layout:
        return self.layouts.layout(i)

    def precision(self, i: int = 0) -> str:
        return PRECISIONS[int(self.layouts.precision[i])]

    def take(self, index: Ints) -> Prediction:
        """The same for some of the layouts only."""
        return replace(
            self, layouts=self.layouts.take(index), time=taken(self.time, index), memory=taken(self.memory, index)
        )

    def gauges(self, i: int = 0) -> dict[str, float]:
        """One layout's prediction by gauge name."""
        time, parts = self.time, self.memory.parts(i)
        speed = float(self.tokens_per_s[i])
        found = {
            "step_s": time.total,
            "compute_s": time.compute,
            "comm_s": time.comm,
            "comm_exposed_s": time.exposed,
            "bubble_s": time.bubble,
            "overhead_s": time.overhead,
            "recompute_s": time.recompute,
            "optimizer_s": time.optimizer,
            "data_wait_s": time.data,
            "micro_batches": time.micro_batches,
            "mfu": self.mfu,
        }
        gauges = {name: float(array[i]) for name, array in found.items()}
        gauges |= {f"memory_{name}_bytes": size for name, size in parts.items()}
        if self.layout(i).offload != "none":
            gauges |= {"offload_s": float(time.offload[i]), "offloaded_bytes": float(self.memory.host[i])}
        return gauges | {
            "hfu": self.hfu(i),
            "tokens_per_s": speed,
            "batch_tokens": float(self.case.batch_tokens),
            "tokens_per_s_per_device": speed / float(self.layouts.num_devices[i]),
            "model_flops_per_token": self.model_flops,
            "memory_peak_bytes": float(self.memory.total[i]),
        }


def predict(case: TrainCase, layouts: Layouts, held: Memory | None = None) -> Prediction:
    """Price every layout, in time and, unless that is known, in memory."""
    held = held or memory(case, layouts)
    return Prediction(case=case, layouts=layouts, time=step_time(case, layouts), memory=held)
