"""What a model can be quantized to: formats, how their codes are found, and which layers they take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from armillary.errors import BadInput, missing
from armillary.kernels.quantized.sparse import prune
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantized.packed_rows import PackedRows, plain
from armillary.model.quantizing.rounding import (
    MXFP4_GROUP,
    IntGrid,
    round_fp8,
    round_inputs_fp8,
    round_inputs_int8,
    round_mxfp4,
)

_SMALLEST_GROUP = 32  # of the groups that int4 kernels of vLLM take
_GGUF_BLOCK = 32
_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One value of `--to`, with the dtype and group size of a model filled in."""

    name: str
    dtype: torch.dtype = torch.float32  # of scales and of what is not quantized
    group: int = 128

    @property
    def spec(self) -> "_Spec":
        return _SPECS[self.name]

    def takes(self, columns: int) -> bool:
        """Whether rows of that width have the format; other layers stay as they are."""
        return columns % self.spec.multiple == 0

    def grid(self, columns: int) -> IntGrid | None:
        """Of integer formats: groups as wide as asked for, or the widest that divides the row; else whole rows."""
        if not self.spec.bits:
            return None
        group = columns if self.spec.bits == 8 else self.group
        while columns % group and group > _SMALLEST_GROUP:
            group //= 2
        group = columns if columns % group else group
        return IntGrid(bits=self.spec.bits, group=group, symmetric=self.spec.symmetric, scale_dtype=self.dtype)

    def round(self, weight_NK: Tensor) -> PackedRows:
        """To nearest."""
        if (grid := self.grid(weight_NK.shape[1])) is not None:
            return grid.round(weight_NK)
        if self.name == "fp8":
            return round_fp8(weight_NK, self.dtype)
        if self.name == "mxfp4":
            return round_mxfp4(weight_NK)
        if self.spec.pruned:
            return plain(prune(weight_NK).to(self.dtype))
        return round_gguf(weight_NK, self.spec.gguf)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    bits: int = 0  # of integer formats
    symmetric: bool = True
    pruned: bool = False  # floats, two of every four of them zero
    calibrated: Literal["", "gptq", "awq", "sparsegpt"] = ""
    multiple: int = 2  # rows whose width is no multiple stay as they are
    round_inputs: Callable[[Tensor], Tensor] | None = None  # as servers do at run time
    gguf: str = ""  # type of its blocks


_SPECS = {
    "fp8": _Spec(round_inputs=round_inputs_fp8),
    "int8": _Spec(bits=8, round_inputs=round_inputs_int8),
    "int4-gptq": _Spec(bits=4, calibrated="gptq"),
    "int4-awq": _Spec(bits=4, symmetric=False, calibrated="awq"),
    "int4-rtn": _Spec(bits=4),
    "mxfp4": _Spec(multiple=MXFP4_GROUP),
    "2:4": _Spec(pruned=True, calibrated="sparsegpt", multiple=4),
    "gguf": _Spec(multiple=_GGUF_BLOCK, gguf="Q8_0"),
    "gguf-q4_0": _Spec(multiple=_GGUF_BLOCK, gguf="Q4_0"),
    "gguf-f16": _Spec(multiple=1, gguf="F16"),
}
TARGETS = tuple(_SPECS)


def find_target(name: str, dtype: torch.dtype, group: int) -> Target:
    if name not in _SPECS:
        raise BadInput(f"'{name}' is no format; these are: {', '.join(TARGETS)}")
    if not 8 <= group <= 1 << 16 or group & (group - 1):
        raise BadInput(f"groups of {group} columns fit no kernel; take a power of two such as 128")
    return Target(name=name, dtype=dtype, group=group)


def round_gguf(weight_NK: Tensor, kind: str) -> PackedRows:
    """Blocks as the gguf package makes them."""
    quants = gguf_package().quants
    blocks = quants.quantize(weight_NK.cpu().numpy().astype(np.float32), gguf_package().GGMLQuantizationType[kind])
    rows = torch.from_numpy(np.ascontiguousarray(blocks).view(np.uint8)).view(len(weight_NK), -1)
    rows = rows.to(weight_NK.device)
    return PackedRows(format=GgufBlocks(kind=kind), rows={"blocks": rows}, columns=weight_NK.shape[1])


def plain_kind(dtype: torch.dtype) -> str:
    """The type of unquantized matrices in a GGUF file."""
    return _KINDS[dtype]


def gguf_package():  # type: ignore[no-untyped-def]
    try:
        import gguf
    except ModuleNotFoundError:
        raise missing("gguf", "writing GGUF files", "quantize") from None
    return gguf
