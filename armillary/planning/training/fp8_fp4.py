"""fp8 and fp4: which GEMMs run in 8 or 4 bits, and the bytes moved to cast their operands.

Other software is taken to read an operand once and to write it plain and transposed, its scale known beforehand;
per-row scales are found, and both forms cast, layer by layer. Our trainer follows its own rule (spec.fp8), and its
casts are counted one by one: they depend on what shares a scale (layout.fp8_scaling).
"""

from typing import NamedTuple

import numpy as np

from armillary.planning.device_model.efficiency import FORMATS
from armillary.planning.device_model.vectorised_layouts import FP8_SCALINGS, PRECISIONS, Array, Bools, Ints, Layouts
from armillary.planning.training.op_sharding import LOW_PRECISION_NEVER, Gemm
from armillary.planning.training.stages import DeviceParameters
from armillary.planning.training.train_case import TrainCase
from armillary.spec.fp8 import MULTIPLE

BF16 = PRECISIONS.index("bf16")
NARROW = np.array([name in ("fp8", "mxfp8", "nvfp4") for name in PRECISIONS])
"""by code of precision: GEMMs run in 8 or 4 bits"""
SIZES = np.array([FORMATS[name][1] for name in PRECISIONS])
"""by code of precision: bytes per operand element"""
TOKEN, TENSOR, ROW = (FP8_SCALINGS.index(name) for name in ("token", "tensor", "row"))
_ADAPTED = {name: name for name in ("qkv", "q", "kv_up", "out")}
_ADAPTED |= {"mlp.gate_up": "up", "mlp.up": "up", "mlp.down": "down"}
"""operation -> matrix, by the names that adapters use"""


STRIDED = 2.0
"""time of reading along columns, to find and apply their scales, over that of its bytes (fp8_h200.md in benchmarks/:
per-row scales cast the transposed form in 59 ms where its bytes take 27)"""


class Casts(NamedTuple):
    """Bytes and kernels of casting the operands of a GEMM."""

    forward: Array
    backward: Array
    kernels_forward: Array
    kernels_backward: Array


def precision_of(case: TrainCase, name: str, layouts: Layouts, gemm: Gemm) -> Ints:
    """Code of the precision of a GEMM on every layout: the layout's, or bf16 where the GEMM stays in 16 bits."""
    never = name in LOW_PRECISION_NEVER and not (name == "head" and case.software.narrow_head)
    stays: Bools = np.full(len(layouts), never)
    if not case.software.narrow_experts:
        stays |= name.startswith(("moe.", "shared."))
    if case.software.fully_shard:
        stays |= (gemm.n % MULTIPLE != 0) | (gemm.k % MULTIPLE != 0)
        stays |= case.lora is not None and (case.lora.on is None or _ADAPTED.get(name) in case.lora.on)
    return np.where(NARROW[layouts.precision] & stays, BF16, layouts.precision)


def casts(case: TrainCase, name: str, layouts: Layouts, precision: Ints, gemm: Gemm) -> Casts:
    """Input and weight in the forward pass; the output's gradient, and what is cast anew, in the backward pass."""
    software, size, two = case.software, SIZES[precision], np.full(len(layouts), 2.0)
    x, dy = gemm.groups * gemm.m * gemm.k, gemm.groups * gemm.m * gemm.n
    if not software.fully_shard or software.eager_layers:
        parts = Casts(x * (2 + 2 * size), dy * (2 + 2 * size), two, two)
        if (layouts.fp8_scaling == ROW).any() and not software.eager_layers:
            by_row, is_row = _by_layer(case, layouts, gemm, size), layouts.fp8_scaling == ROW
            parts = Casts(*(np.where(is_row, row, usual) for row, usual in zip(by_row, parts, strict=True)))
    elif software.fused_blocks:
        inputs, gradients = _source_bytes(name, gated=case.model.gated)
        kernels = np.where(layouts.fp8_scaling == TOKEN, 2.0, 3.0)
        forward, backward = (_plain_and_transposed(layouts.fp8_scaling, reads, size) for reads in (inputs, gradients))
        parts = Casts(x * forward, dy * backward, kernels, kernels)
    else:
        parts = _by_layer(case, layouts, gemm, size)
    return Casts(*(np.where(NARROW[precision], part, 0.0) for part in parts))


def _by_layer(case: TrainCase, layouts: Layouts, gemm: Gemm, size: Array) -> Casts:
    """Each layer casts its input and its weight, and both again, transposed, in the backward pass. A frozen weight has
    no gradient, for which input and output gradient would be transposed."""
    scaling, frozen = layouts.fp8_scaling, case.lora is not None
    x, dy, weight = (gemm.groups * elements for elements in (gemm.m * gemm.k, gemm.m * gemm.n, gemm.n * gemm.k))
    per_tensor = scaling == TENSOR  # one more read, for the scale
    rows = 2 + size + 2.0 * per_tensor
    transposed = np.select([scaling == TOKEN, scaling == ROW], [2 + 3 * size, STRIDED * (4 + size)], 4 + size)
    gradient = rows if frozen else _plain_and_transposed(scaling, 2.0, size)
    backward = dy * gradient + weight * (4 + size) + (0.0 if frozen else x * transposed)
    kernels = np.where(scaling == TOKEN, 2.0, 3.0) + (0 if frozen else 2) + 2
    return Casts((x + weight) * rows, backward, 2.0 + 2.0 * per_tensor, kernels)


def _plain_and_transposed(scaling: Ints, reads: float, size: Array) -> Array:
    """Bytes per element to cast plain and transposed: the source is read once and two results are written at least.
    Per-token scales: the fp8 rows are read again to be transposed. A per-tensor scale needs one more read of the source
    first; per-row scales of both forms need two more, along columns, and no second read of the rows."""
    strided = np.full_like(size, STRIDED * 2 * reads)
    more = np.select([scaling == TENSOR, scaling == ROW], [size + reads, strided], size)
    return 2 + 2 * size + more


def _source_bytes(name: str, *, gated: bool) -> tuple[float, float]:
    """Bytes that fused blocks read per element of a GEMM's input, and of its output's gradient: 16 bits; gate and up
    for an activation; and for its backward pass the gradient beside them."""
    inputs = (4.0 if gated else 2.0) if name == "mlp.down" else 2.0
    return inputs, {"mlp.gate_up": 3.0, "mlp.up": 3.0 if gated else 4.0}.get(name, 2.0)


def weights_s(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Fused blocks cast their weights once per step, from fp32: read and written by rows and by columns, after a read
    for the scales; per-tensor scales: read once for the scale, cast, and transposed."""
    size, per_tensor = SIZES[layouts.precision], layouts.fp8_scaling == TENSOR
    each = np.where(per_tensor, 4 + 4 + size + 2 * size, 4 + size + 4 + 4 + size)
    is_cast = NARROW[layouts.precision] & case.software.fused_blocks & (case.lora is None)
    return np.where(is_cast, params.dense - params.ends, 0.0) * each / case.curves.bytes_per_s
