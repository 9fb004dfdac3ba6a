"""compressed-tensors folders: fp8, int8 and int4 weights, NVFP4 and MXFP4, per tensor, row, group or block.

Names and layouts as its 0.20 release writes them (github.com/vllm-project/compressed-tensors).
"""

from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.kernels.quantized.weight_only import nibbles
from armillary.model.quantized.formats import Fp4, Fp8, IntGroups, pack_nibbles
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.stored import FLOATS, Stored, check_shape, is_count

E4M3 = torch.float8_e4m3fn


def read_module(stored: Stored, module: str, shape: tuple[int, int], scheme: dict[str, Any]) -> PackedRows | None:
    """The weight [N, K] of a linear module, packed; None where it is stored as plain floats. `scheme` is its entry of
    config_groups."""
    if not stored.has(f"{module}.weight_packed") and not stored.has(f"{module}.weight_scale"):
        return None
    weights = scheme.get("weights") or {}
    stored.skip(*(f"{module}.{name}" for name in ("input_scale", "input_zero_point", "input_global_scale")))
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if not is_count(bits):
        raise BadModel(f"{module}: weights of {str(bits)[:20]} bits; mend num_bits in quantization_config")
    if (kind, bits) == ("float", 8):
        inputs = scheme.get("input_activations") or {}
        rounded = (inputs.get("type"), inputs.get("num_bits")) == ("float", 8)
        return read_fp8(stored, module, shape, f"{module}.weight_scale", weights.get("block_structure"), rounded)
    if (kind, bits) == ("float", 4):
        return _read_fp4(stored, module, shape)
    if kind == "int" and bits in (4, 8):
        return _read_int(stored, module, shape, scheme)
    raise BadModel(f"{module}: weights of {bits} bits and type {kind} are not supported; int4, int8, fp8 and fp4 are")


def read_fp8(
    stored: Stored, module: str, shape: tuple[int, int], scale_name: str, block: Any, fp8_activations: bool
) -> PackedRows:
    """E4M3 codes with a scale per tensor, row, or block of `block` rows and columns."""
    name = f"{module}.weight"
    codes = check_shape(name, stored.get(name, E4M3), *shape)
    scale, (rows, columns) = stored.get(scale_name, *FLOATS, torch.float8_e8m0fnu), shape
    if scale.dtype == torch.float8_e8m0fnu:  # powers of two; too few bits for arithmetic
        scale = scale.float()
    if block is None:
        format = Fp8(group=columns, fp8_activations=fp8_activations)
        return _packed(format, columns, codes=codes.view(torch.uint8), scale=_of_rows(scale, scale_name, rows))
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(is_count(n) for n in block)):
        raise BadModel(f"{module}: blocks of {block} are no blocks of rows and columns; mend quantization_config")
    high, wide = min(block[0], rows), min(block[1], columns)
    check_shape(scale_name, scale, -(-rows // high), -(-columns // wide))
    of_row = scale.repeat_interleave(high, dim=0)[:rows]
    format = Fp8(group=wide, fp8_activations=fp8_activations)
    return _packed(format, columns, codes=codes.view(torch.uint8), scale=of_row)


def _read_fp4(stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows:
    rows, columns = shape
    name, scale_name, divisor_name = (f"{module}.weight_{end}" for end in ("packed", "scale", "global_scale"))
    codes = check_shape(name, stored.get(name, torch.uint8), rows, columns // 2)
    scale = stored.get(scale_name, torch.uint8, E4M3)
    if scale.dtype == torch.uint8:
        check_shape(scale_name, scale, rows, columns // 32)
        return _packed(Fp4(group=32, powers=True), columns, codes=codes, scale=scale)
    check_shape(scale_name, scale, rows, columns // 16)
    divisor = _of_rows(stored.get(divisor_name, torch.float32), divisor_name, rows)
    return _packed(Fp4(group=16, powers=False), columns, codes=codes, scale=scale.view(torch.uint8), divisor=divisor)


def _read_int(stored: Stored, module: str, shape: tuple[int, int], scheme: dict[str, Any]) -> PackedRows:
    weights, (rows, columns) = scheme["weights"], shape
    bits, group = weights["num_bits"], _group(module, weights, columns)
    scale_name, zero_name = f"{module}.weight_scale", f"{module}.weight_zero_point"
    packed = stored.has(f"{module}.weight_packed")
    codes = _int32_codes(stored, module, shape, bits) if packed else _byte_codes(stored, module, shape, bits)
    scale, groups = stored.get(scale_name, *FLOATS), -(-columns // group)
    scale = _of_rows(scale, scale_name, rows) if groups == 1 else check_shape(scale_name, scale, rows, groups)
    tensors = {"codes": codes, "scale": scale}
    has_zeros = not weights.get("symmetric", True)
    if has_zeros:
        tensors["zero"] = _zeros(stored.get(zero_name), zero_name, rows, groups, bits)
    else:
        stored.skip(zero_name)
    order = None
    if stored.has(f"{module}.weight_g_idx"):
        order = column_order(stored.get(f"{module}.weight_g_idx"), f"{module}.weight_g_idx", columns, group, groups)
        tensors["codes"] = reorder_codes(codes, order, bits)
    activations = scheme.get("input_activations") or {}
    rounded = activations.get("type") == "int" and activations.get("num_bits") == 8
    a8 = rounded and bits == 8 and groups == 1 and not has_zeros
    format = IntGroups(bits=bits, group=group, zeros=has_zeros, int8_activations=a8)
    return PackedRows(format=format, rows=tensors, columns=columns, order_K=order)


def _group(module: str, weights: dict[str, Any], columns: int) -> int:
    """Columns with one scale."""
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy in ("tensor", "channel") or (strategy is None and group in (None, -1)):
        return columns
    return check_group(module, group, columns)


def check_group(module: str, group: Any, columns: int) -> int:
    """A group size of a config: 1 to K; -1 and None are K."""
    if group in (None, -1):
        return columns
    if not is_count(group, columns):
        raise BadModel(f"{module}: groups of {group} in rows of {columns} weights; mend quantization_config")
    return group


def _int32_codes(stored: Stored, module: str, shape: tuple[int, int], bits: int) -> Tensor:
    """[N, K·bits/8] bytes: int32 words hold their codes from the low bits up, as our bytes do."""
    rows, columns = shape
    name = f"{module}.weight_packed"
    stored.skip(f"{module}.weight_shape")
    words = check_shape(name, stored.get(name, torch.int32), rows, -(-columns * bits // 32))
    return words.contiguous().view(torch.uint8)[:, : columns * bits // 8]


def _byte_codes(stored: Stored, module: str, shape: tuple[int, int], bits: int) -> Tensor:
    name = f"{module}.weight"
    signed = check_shape(name, stored.get(name, torch.int8), *shape)
    codes = (signed.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    return codes if bits == 8 else pack_nibbles(codes)


def _zeros(zero: Tensor, name: str, rows: int, groups: int, bits: int) -> Tensor:
    """[N, G] unsigned: int32 words pack them along the rows; otherwise they are signed bytes."""
    if zero.dtype == torch.int8:
        return (check_shape(name, zero, rows, groups).to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    words = check_shape(name, zero, -(-rows * bits // 32), groups)
    return unpack_int32(words.t().contiguous(), bits)[:, :rows].t().contiguous()


def unpack_int32(words: Tensor, bits: int) -> Tensor:
    """[n, W] int32 words of 4- or 8-bit codes, low bits first -> [n, W · 32 / bits] uint8."""
    if words.dtype != torch.int32:
        raise BadModel(f"packed codes are {str(words.dtype).removeprefix('torch.')}, not int32; fetch the model again")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2).to(torch.uint8)


def column_order(group_K: Tensor, name: str, columns: int, group: int, groups: int) -> Tensor | None:
    """The order that brings the columns of each group together; None where they are. BadModel for groups of other
    sizes than the config says."""
    check_shape(name, group_K, columns)
    if bool((group_K < 0).all()):  # not initialised: no act-order
        return None
    expected = torch.arange(columns) // group
    if not torch.equal(group_K.long().sort().values, expected) or expected[-1] != groups - 1:
        raise BadModel(f"{name} does not assign {group} columns to each group; fetch the model again")
    order = group_K.long().argsort(stable=True)
    return None if torch.equal(group_K.long(), expected) else order.int()


def reorder_codes(codes: Tensor, order: Tensor | None, bits: int) -> Tensor:
    """Packed codes with their columns in another order."""
    if order is None:
        return codes
    if bits == 8:
        return codes[:, order]
    return pack_nibbles(nibbles(codes)[:, order])


def _of_rows(scale: Tensor, name: str, rows: int) -> Tensor:
    """[N, 1] of a number per tensor or per row."""
    if scale.numel() not in (1, rows):
        raise BadModel(f"{name} has {scale.numel()} scales for {rows} rows; fetch the model again")
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


def _packed(format: Any, columns: int, **rows: Tensor) -> PackedRows:
    return PackedRows(format=format, rows=rows, columns=columns)
