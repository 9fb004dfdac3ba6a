"""The GEMMs of one layer of a training plan as one device runs them: work, traffic and predicted time."""

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.training.fp8_fp4 import SIZES, precision_of
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.op_sharding import local_gemm
from armillary.planning.training.op_times import gemm_s
from armillary.spec.arithmetic.workload import layer_operations, make_batch


@dataclass(frozen=True, kw_only=True)
class LayerGemm:
    """One GEMM of the forward pass, for one micro-batch."""

    name: str
    shape: tuple[float, float, float, float]
    """groups, m, n, k"""
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


def layer_gemms(prediction: Prediction) -> list[LayerGemm]:
    """Those of a layer of the commonest kind, in the first layout of a prediction."""
    case, layouts = prediction.case, prediction.layouts.take(np.array([0]))
    kind = max(set(case.model.layers), key=case.model.layers.count)
    batch = make_batch([case.sequence] * int(layouts.micro_batch[0]), flash=case.flash)
    experts = case.model.moe.num_experts if case.model.moe else 0
    gemms = []
    for op in (each.forward for each in layer_operations(case.model, kind, batch) if each.forward.kind == "matmul"):
        gemm = local_gemm(op, layouts, experts)
        precision = precision_of(case, op.name, layouts, gemm)
        seconds = float(gemm_s(case, precision, gemm.groups, gemm.m, gemm.n, gemm.k)[0]) * case.software.gemm
        groups, m, n, k = (float(size[0]) for size in (gemm.groups, gemm.m, gemm.n, gemm.k))
        size, output = float(SIZES[precision][0]), 4.0 if bool(WIDE[precision][0]) else 2.0
        moved = groups * ((m * k + k * n) * size + m * n * output)
        flops = float(gemm.flops[0])
        gemms.append(LayerGemm(name=op.name, shape=(groups, m, n, k), flops=flops, bytes=moved, seconds=seconds))
    return gemms
