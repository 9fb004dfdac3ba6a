"""fp8 weights for many tokens on the fp8 units of a GPU, where the checkpoint means its inputs to be in fp8 too."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.choose_version import choose
from armillary.kernels.core.op import Case, find_op
from armillary.kernels.fp8.matmul import Fp8MatmulCase
from armillary.kernels.quantized.block_fp8 import BLOCK, BlockFp8Case, in_blocks
from armillary.model.quantized.formats import Fp8
from armillary.model.quantized.packed_rows import PackedRows

_TOKENS = 256  # that stand for many in the choice

Matmul = Callable[[Tensor], Tensor]


def fp8_matmul(part: PackedRows, dtype: str) -> Matmul | None:
    """fp8(x) @ weightᵀ for x in `dtype`: a scale per token where the weight has one per row, else one per token and 128
    inputs. None where inputs are to stay as they are, or no version takes the weight and agrees on this device."""
    format, scale = part.format, part.rows["scale"]
    if not isinstance(format, Fp8) or not format.fp8_activations:
        return None
    codes = part.rows["codes"].view(torch.float8_e4m3fn)
    sizes: dict[str, Any] = {"outputs": part.num_rows, "inputs": part.columns}
    on: dict[str, Any] = {"tokens": _TOKENS, "dtype": dtype, "device": codes.device.type}
    if scale.shape[1] == 1:
        run = _chosen("fp8_matmul", Fp8MatmulCase(**sizes, **on))
        return None if run is None else partial(_multiplied, run, codes, scale)
    if format.group != BLOCK or part.columns % BLOCK:
        return None
    scale = in_blocks(scale)
    run = _chosen("block_fp8_linear", BlockFp8Case(**sizes, by_row=len(scale) == part.num_rows, **on))
    return None if run is None else partial(_multiplied, run, codes, scale)


def _multiplied(run: Callable[..., Tensor], codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return run(x, codes, scale.float())


@cache
def _chosen(op: str, case: Case) -> Callable[..., Tensor] | None:
    choice = choose(find_op(op), case, deterministic=True)
    return None if choice.version == "eager" else choice.run
