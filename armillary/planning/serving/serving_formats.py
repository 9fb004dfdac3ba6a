"""Which number formats a chip serves a model in, from the one its weights are kept in."""

from __future__ import annotations

from armillary.errors import unknown
from armillary.planning.serving.forward_ops import Formats
from armillary.spec.hardware import Chip

STORED = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "tf32": "fp32",
    "fp8": "fp8",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "int8": "int8",
    "int4": "int4",
}
"""what people write -> format of the weights"""


def serving_formats(weights: str, chip: Chip, kv: str = "auto") -> Formats:
    """Integers are weight-only; narrow floats are computed in where the chip can, else stored only. The cache is fp8
    beside fp8 and fp4, unless said otherwise."""
    if weights not in STORED:
        raise unknown("precision", weights, STORED)
    stored = STORED[weights]
    narrow = stored in ("fp8", "fp4")
    compute = stored if stored in ("fp32", "fp16") or (narrow and chip.peak(stored)) else "bf16"
    cache = ("fp8" if narrow else compute) if kv == "auto" else STORED.get(kv, "bf16")
    return Formats(weights=stored, compute=compute, kv=cache)
