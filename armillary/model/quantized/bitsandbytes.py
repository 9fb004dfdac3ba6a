"""bitsandbytes folders: nf4 and fp4 in blocks along the flattened weight, and int8 with a maximum per row."""

import json
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.model.quantized.formats import Int8Rows, Lookup4Bit
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.stored import Stored, check_shape, is_count

_LARGEST = 3.4e38  # of fp32


def read_module(stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows | None:
    """The weight [N, K] of a linear module, packed; None where it is stored as plain floats."""
    name = f"{module}.weight"
    if stored.has(f"{module}.SCB"):
        return _read_int8(stored, module, shape)
    for kind in ("nf4", "fp4"):
        if stored.has(f"{name}.quant_state.bitsandbytes__{kind}"):
            return _read_4bit(stored, name, shape, f"{name}.quant_state.bitsandbytes__{kind}")
    return None


def _read_int8(stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows:
    codes = check_shape(f"{module}.weight", stored.get(f"{module}.weight", torch.int8), *shape)
    maximum = check_shape(f"{module}.SCB", stored.get(f"{module}.SCB", torch.float32), shape[0])
    if stored.has(f"{module}.weight_format") and int(stored.get(f"{module}.weight_format")) != 0:
        raise BadModel(f"{module}: its int8 weight is not stored in rows; save the model again with bitsandbytes")
    rows = {"codes": codes.view(torch.uint8), "maximum": maximum[:, None]}
    return PackedRows(format=Int8Rows(), rows=rows, columns=shape[1])


def _read_4bit(stored: Stored, name: str, shape: tuple[int, int], state_name: str) -> PackedRows:
    rows, columns = shape
    state = _state(stored.get(state_name, torch.uint8), state_name)
    block: Any = state.get("blocksize")
    if not is_count(block) or columns % block or columns % 2:
        raise BadModel(f"{name}: blocks of {block} do not fill rows of {columns} weights; quantize it in blocks of 64")
    if (stated := state.get("shape")) != list(shape):
        raise BadModel(f"{name} has shape {str(stated)[:40]} where config.json says {list(shape)}; fetch it again")
    codes = stored.get(name, torch.uint8)
    check_shape(name, codes.flatten(), rows * columns // 2)
    maximum = stored.get(f"{name}.absmax", torch.float32, torch.uint8)
    check_shape(f"{name}.absmax", maximum.flatten(), rows * columns // block)
    tensors = {"codes": codes.reshape(rows, -1), "maximum": maximum.reshape(rows, -1)}
    nested: dict[str, Any] = {}
    if maximum.dtype == torch.uint8:
        nested = _nested(stored, name, state, tensors)
    table = _table(stored, f"{name}.quant_map", 16)
    return PackedRows(format=Lookup4Bit(block=block, table=table, **nested), rows=tensors, columns=columns)


def _nested(stored: Stored, name: str, state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fields of the format for maxima that are quantized too; each row gets the second maxima that it needs."""
    block, (rows, groups) = state.get("nested_blocksize"), tensors["maximum"].shape
    offset: Any = state.get("nested_offset")
    if not is_count(block) or type(offset) not in (float, int) or not abs(offset) < _LARGEST:
        raise BadModel(f"{name}: its nested quantization state is incomplete; save the model again with bitsandbytes")
    second = stored.get(f"{name}.nested_absmax", torch.float32).flatten()
    check_shape(f"{name}.nested_absmax", second, -(-rows * groups // block))
    begin = torch.arange(rows) * groups
    nth = (begin // block)[:, None] + torch.arange((groups + block - 2) // block + 1)
    tensors["first"] = (begin % block).int()[:, None]
    tensors["nested_maximum"] = second[nth.clamp_max(len(second) - 1)]
    table = _table(stored, f"{name}.nested_quant_map", 256)
    return {"nested_block": block, "nested_offset": float(offset), "nested_table": table}


def _table(stored: Stored, name: str, size: int) -> tuple[float, ...]:
    return tuple(check_shape(name, stored.get(name, torch.float32), size).tolist())


def _state(encoded: Tensor, name: str) -> dict[str, Any]:
    """Numbers beside the tensors, as JSON in a tensor of bytes."""
    try:
        state = json.loads(bytes(encoded.flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise BadModel(f"{name} is not a quantization state; fetch the model again")
    return state
