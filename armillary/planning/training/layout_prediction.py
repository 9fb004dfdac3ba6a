"""Prediction: time and memory of layouts together, and the gauges of one of them.

MFU counts 6·N FLOPs per token and causal attention as half, over the chip's dense 16-bit peak whatever the dtype of the
GEMMs; HFU counts recompute too (spec.arithmetic.mfu).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.planning.device_model.frameworks import interval_width
from armillary.planning.device_model.vectorised_layouts import (
    PRECISIONS,
    RECOMPUTES,
    Array,
    Bools,
    Ints,
    Layouts,
    take_rows,
)
from armillary.planning.training.memory_breakdown import Memory, fits, memory
from armillary.planning.training.step_time import StepTime, step_time
from armillary.planning.training.train_case import TrainCase
from armillary.planning.training.uncertainty import Interval, interval, spread
from armillary.spec.arithmetic.mfu import hardware_flops_per_token, model_flops_per_token
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Layouts with their predicted time and memory."""

    case: TrainCase
    layouts: Layouts
    time: StepTime
    memory: Memory

    @property
    def fits(self) -> Bools:
        return fits(self.case, self.layouts, self.memory)

    @property
    def memory_limit(self) -> float:
        """Bytes of one device; infinite where unknown."""
        return self.case.cluster.chip.memory_bytes or float("inf")

    @property
    def tokens_per_s(self) -> Array:
        return self.case.batch_tokens / self.time.total

    @property
    def mfu(self) -> Array:
        return self.tokens_per_s * self.model_flops / self.layouts.num_devices / self.case.curves.usual_peak

    @property
    def model_flops(self) -> float:
        """FLOPs per token by the MFU convention."""
        return model_flops_per_token(self.case.model, self.case.sequence, **self._adapters())

    def _adapters(self) -> dict[str, int]:
        """Frozen weights and trained adapters, as the FLOPs conventions count them."""
        lora = self.case.lora
        return {"frozen": parameters(self.case.model).multiplied, "adapters": lora.parameters} if lora else {}

    def hfu(self, i: int = 0) -> float:
        """FLOPs executed over the dense 16-bit peak, for one layout."""
        done = hardware_flops_per_token(
            self.case.model,
            self.case.sequence,
            recompute=RECOMPUTES[int(self.layouts.recompute[i])],  # type: ignore[arg-type]
            recompute_every=int(self.layouts.recompute_every[i]),
            flash=self.case.flash,
            **self._adapters(),
        )
        return float(self.mfu[i]) * done / self.model_flops

    def layout(self, i: int = 0) -> Layout:
        return self.layouts.layout(i)

    def precision(self, i: int = 0) -> str:
        return PRECISIONS[int(self.layouts.precision[i])]

    def layout_text(self, i: int = 0) -> str:
        """'tp=4 × pp=8 × dp=2 · 5 chunks per stage · zero 1 · micro-batch 1 · recompute none · fp8'."""
        layout = self.layout(i)
        parts = [layout.text("tp", "pp", "cp", "ep", "dp")]
        parts += [f"{layout.interleave} chunks per stage"] if layout.interleave > 1 else []
        parts += [f"zero {layout.zero}" + (f" in {layout.shard}s" if layout.shard else "")] if layout.zero else []
        parts += [f"micro-batch {layout.micro_batch}", f"recompute {layout.recompute}", self.precision(i)]
        return " · ".join(parts + ([f"offload {layout.offload}"] if layout.offload != "none" else []))

    def step_interval(self, i: int = 0) -> Interval:
        """90 % interval of one layout's step."""
        width = interval_width(self.case.software.name)
        return interval(float(self.time.total[i]), float(spread(self.case, self.time)[i]), width)

    def take(self, index: Ints) -> Prediction:
        """The prediction for some of the layouts."""
        return replace(
            self,
            layouts=self.layouts.take(index),
            time=take_rows(self.time, index),
            memory=take_rows(self.memory, index),
        )

    def gauges(self, i: int = 0) -> dict[str, float]:
        """Gauges of one layout."""
        time, parts = self.time, self.memory.parts(i)
        speed = float(self.tokens_per_s[i])
        terms = {
            "step_s": time.total,
            "compute_s": time.compute,
            "comm_s": time.comm,
            "comm_exposed_s": time.exposed,
            "bubble_s": time.bubble,
            "overhead_s": time.overhead,
            "recompute_s": time.recompute,
            "optimizer_s": time.optimizer,
            "data_wait_s": time.data,
            "micro_batches": time.work.micro_batches,
            "mfu": self.mfu,
        }
        gauges = {name: float(array[i]) for name, array in terms.items()}
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


def predict(case: TrainCase, layouts: Layouts, usage: Memory | None = None) -> Prediction:
    """Time and memory of every layout; `usage` is the memory where it is known already."""
    usage = usage or memory(case, layouts)
    return Prediction(case=case, layouts=layouts, time=step_time(case, layouts), memory=usage)
