"""Experts in MXFP4 as GPT-OSS is published: the experts of a layer stacked, [E, N, K] in blocks of 32 columns.

`NAME_blocks` [E, N, K / 32, 16] holds E2M1 codes, the low nibble first; `NAME_scales` [E, N, K / 32] exponents with
bias 127. Rows of gate and up alternate, as ours do. (Plain, the same stack is stored as [E, K, N].)
"""

import torch

from armillary.errors import BadModel
from armillary.model.quantized.formats import Fp4
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.stored import Stored, check_shape

_GROUP = 32  # columns with one exponent


def blocks_name(name: str) -> str:
    return f"{name}_blocks"


def read_experts(stored: Stored, name: str, shape: tuple[int, int, int]) -> list[PackedRows]:
    """The weight [N, K] of each expert, all in the memory of the stack."""
    num_experts, rows, columns = shape
    if columns % _GROUP:
        raise BadModel(f"{name}: rows of {columns} weights are no multiple of {_GROUP}; fetch the model again")
    groups = columns // _GROUP
    blocks = stored.get(blocks_name(name), torch.uint8)
    check_shape(blocks_name(name), blocks, num_experts, rows, groups, _GROUP // 2)
    scales = stored.get(f"{name}_scales", torch.uint8)
    check_shape(f"{name}_scales", scales, num_experts, rows, groups)
    format = Fp4(group=_GROUP, powers=True)
    return [
        PackedRows(format=format, rows={"codes": codes, "scale": scale}, columns=columns)
        for codes, scale in zip(blocks.flatten(2), scales, strict=True)
    ]
