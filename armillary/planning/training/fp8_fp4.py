"""Which products run in 8 or 4 bits, and the bytes that casting their operands moves.

Other software is taken to read an operand once and to write it both ways round. Our trainer's products follow its rule
(spec.fp8), and its passes are counted one by one: they depend on what shares a scale (layout.fp8_scaling).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from armillary.planning.device_model.efficiency import FORMATS
from armillary.planning.device_model.layout_arrays import FP8_SCALINGS, PRECISIONS, Array, Bools, Ints, Layouts
from armillary.planning.training.parameters_per_device import Held
from armillary.planning.training.sharding import LOW_PRECISION_NEVER, Product
from armillary.planning.training.train_case import TrainCase
from armillary.spec.fp8 import MULTIPLE

BF16 = PRECISIONS.index("bf16")
NARROW = np.array([name in ("fp8", "mxfp8", "nvfp4") for name in PRECISIONS])
"""by code of precision: products run on 8 or 4 bits"""
SIZES = np.array([FORMATS[name][1] for name in PRECISIONS])
"""by code of precision: bytes of an operand"""
TOKEN, TENSOR, ROW = (FP8_SCALINGS.index(name) for name in ("token", "tensor", "row"))
_ADAPTED = {"qkv": "qkv", "out": "out", "mlp.gate_up": "up", "mlp.up": "up", "mlp.down": "down"}
"""operation -> matrix, as adapters name it"""


class Casts(NamedTuple):
    """What casting the operands of a product moves."""

    forward: Array
    """bytes of the forward pass"""
    backward: Array
    """of the backward pass"""
    kernels_forward: Array
    """kernels of the forward pass"""
    kernels_backward: Array
    """of the backward pass"""


def precision_of(case: TrainCase, name: str, layouts: Layouts, mine: Product) -> Ints:
    """Code of the format that a product runs in on every layout: that of the layout, or bf16 where it stays wide."""
    stays: Bools = np.full(len(layouts), name in LOW_PRECISION_NEVER)
    if not case.software.narrow_experts:
        stays |= name.startswith(("moe.", "shared."))
    if case.software.fully_shard:
        stays |= (mine.n % MULTIPLE != 0) | (mine.k % MULTIPLE != 0)
        stays |= case.lora is not None and (case.lora.on is None or _ADAPTED.get(name) in case.lora.on)
    return np.where(NARROW[layouts.precision] & stays, BF16, layouts.precision)


def casts(case: TrainCase, name: str, layouts: Layouts, precision: Ints, mine: Product) -> Casts:
    """For input and weight in the forward pass; for the output's gradient, and what is made anew, in the backward."""
    software, size, two = case.software, SIZES[precision], np.full(len(layouts), 2.0)
    x, dy = mine.groups * mine.m * mine.k, mine.groups * mine.m * mine.n
    if not software.fully_shard or software.plain_layers:
        found = Casts(x * (2 + 2 * size), dy * (2 + 2 * size), two, two)
    elif software.whole_blocks:
        made, back = _reads(name, gated=case.model.gated)
        passes = np.where(layouts.fp8_scaling == TOKEN, 2.0, 3.0)
        forward, backward = (_both_ways(layouts.fp8_scaling, reads, size) for reads in (made, back))
        found = Casts(x * forward, dy * backward, passes, passes)
    else:
        found = _by_layer(case, layouts, mine, size)
    return Casts(*(np.where(NARROW[precision], one, 0.0) for one in found))


def _by_layer(case: TrainCase, layouts: Layouts, mine: Product, size: Array) -> Casts:
    """Each layer casts its input and its weight, and both again, transposed, on the way back; a frozen weight has no
    gradient, for which input and output's gradient would be transposed."""
    scaling, frozen = layouts.fp8_scaling, case.lora is not None
    x, dy, weight = (mine.groups * one for one in (mine.m * mine.k, mine.m * mine.n, mine.n * mine.k))
    looked = scaling == TENSOR
    rows = 2 + size + 2.0 * looked
    turned = np.where(scaling == TOKEN, 2 + 3 * size, 4 + size)
    gradient = rows if frozen else _both_ways(scaling, 2.0, size)
    backward = dy * gradient + weight * (4 + size) + (0.0 if frozen else x * turned)
    kernels = np.where(scaling == TOKEN, 2.0, 3.0) + (0 if frozen else 2) + 2
    return Casts((x + weight) * rows, backward, 2.0 + 2.0 * looked, kernels)


def _both_ways(scaling: Ints, reads: float, size: Array) -> Array:
    """Bytes an element as it stands and transposed, what makes it read once and written twice at least. Rows in fp8
    are read again to be transposed; one scale for all needs a look at what makes it first; one a row of both forms two
    more, and no rows again."""
    more = np.select([scaling == TENSOR, scaling == ROW], [size + reads, np.full_like(size, 2 * reads)], size)
    moved: Array = 2 + 2 * size + more
    return moved


def _reads(name: str, *, gated: bool) -> tuple[float, float]:
    """Bytes that whole blocks read to make an element of a product's input, and of its output's gradient: 16 bits,
    gate and up for an activation, and for its backward pass the gradient beside them."""
    made = (4.0 if gated else 2.0) if name == "mlp.down" else 2.0
    back = {"mlp.gate_up": 3.0, "mlp.up": 3.0 if gated else 4.0}.get(name, 2.0)
    return made, back


def weights_s(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """Whole blocks round their weights once a step, from fp32: read and written by rows and by columns, whose scales
    are looked for first; or looked at once, written, and transposed."""
    size, one = SIZES[layouts.precision], layouts.fp8_scaling == TENSOR
    each = np.where(one, 4 + 4 + size + 2 * size, 4 + size + 4 + 4 + size)
    rounded = NARROW[layouts.precision] & case.software.whole_blocks & (case.lora is None)
    seconds: Array = np.where(rounded, mine.dense - mine.ends, 0.0) * each / case.curves.bytes_per_s
    return seconds
