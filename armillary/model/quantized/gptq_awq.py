"""GPTQ and AWQ folders: int32 words of 4- or 8-bit codes, with a scale and a zero per group of inputs and output.

Both store the transpose of our layout, [K, N]: GPTQ packs along K, AWQ along N in an order of its own. GPTQ's first
format stores zeros minus one; "gptq_v2" stores them as they are. The one is subtracted from all codes of a word at once
(gptqmodel), so that a zero of 0 borrows from the next code, and is given back by adding to the word.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.model.quantized.compressed_tensors import check_group, column_order, reorder_codes, unpack_int32
from armillary.model.quantized.formats import IntGroups, pack_nibbles
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.stored import FLOATS, Stored, check_shape, is_count

_ONE_IN_EACH = {4: 0x11111111, 8: 0x01010101}
"""a word with 1 in each of its codes, by their bits"""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""column n of eight is the nibble _AWQ_ORDER[n] of its word (AutoAWQ, GEMM version)"""


@dataclass(frozen=True, kw_only=True)
class Gptq:
    """Reads modules of a GPTQ folder."""

    bits: int
    group: int | None
    plus_one: bool  # zeros are stored minus one
    mixed: bool  # some modules have other bits or groups, which their shapes say

    @classmethod
    def of(cls, table: dict[str, Any]) -> "Gptq":
        bits = table.get("bits")
        if not is_count(bits) or bits not in (4, 8):
            raise BadModel(f"GPTQ weights of {str(bits)[:20]} bits are not supported; 4 and 8 are")
        return cls(
            bits=bits,
            group=table.get("group_size"),
            plus_one=table.get("checkpoint_format") != "gptq_v2",
            mixed=bool(table.get("dynamic") or table.get("extra_config")),
        )

    def read_module(self, stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows | None:
        if not stored.has(f"{module}.qweight"):
            return None
        rows, columns = shape
        words = stored.get(f"{module}.qweight", torch.int32)
        zeros = stored.get(f"{module}.qzeros", torch.int32)
        bits, group = self._of_module(module, words, zeros, columns)
        groups, per_word = -(-columns // group), 32 // bits
        check_shape(f"{module}.qweight", words, -(-columns // per_word), rows)
        check_shape(f"{module}.qzeros", zeros, groups, -(-rows // per_word))
        codes_NK = unpack_int32(words.t().contiguous(), bits)[:, :columns]
        zero_NG = unpack_int32(zeros + _ONE_IN_EACH[bits] if self.plus_one else zeros, bits)[:, :rows].t()
        order = None
        if stored.has(f"{module}.g_idx"):
            order = column_order(stored.get(f"{module}.g_idx"), f"{module}.g_idx", columns, group, groups)
        return _packed(stored, module, shape, bits, group, codes_NK, zero_NG, order)

    def _of_module(self, module: str, words: Tensor, zeros: Tensor, columns: int) -> tuple[int, int]:
        """Its bits and the columns of a group."""
        bits, group = self.bits, check_group(module, self.group, columns)
        if not self.mixed or words.dim() != 2 or zeros.dim() != 2:
            return bits, group
        bits = next((each for each in _ONE_IN_EACH if len(words) == -(-columns * each // 32)), bits)
        if len(zeros) != -(-columns // group):
            group = max(1, columns // max(1, len(zeros)))
        return bits, group


@dataclass(frozen=True, kw_only=True)
class Awq:
    """Reads modules of an AWQ folder."""

    group: int | None

    @classmethod
    def of(cls, table: dict[str, Any]) -> "Awq":
        bits, version = table.get("bits", table.get("w_bit")), str(table.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise BadModel(f"AWQ weights of {bits} bits, version {version}, are not supported; 4 bits of gemm are")
        return cls(group=table.get("group_size", table.get("q_group_size")))

    def read_module(self, stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows | None:
        if not stored.has(f"{module}.qweight"):
            return None
        rows, columns = shape
        group = check_group(module, self.group, columns)
        words = stored.get(f"{module}.qweight", torch.int32)
        check_shape(f"{module}.qweight", words, columns, rows // 8)
        zeros = stored.get(f"{module}.qzeros", torch.int32)
        check_shape(f"{module}.qzeros", zeros, -(-columns // group), rows // 8)
        return _packed(stored, module, shape, 4, group, _awq_codes(words).t(), _awq_codes(zeros).t(), None)


def _awq_codes(words: Tensor) -> Tensor:
    """[n, 8·W] of int32 words [n, W]."""
    return unpack_int32(words, 4).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)


def _packed(
    stored: Stored,
    module: str,
    shape: tuple[int, int],
    bits: int,
    group: int,
    codes_NK: Tensor,
    zero_NG: Tensor,
    order: Tensor | None,
) -> PackedRows:
    rows, columns = shape
    scale_name = f"{module}.scales"
    scale = check_shape(scale_name, stored.get(scale_name, *FLOATS), -(-columns // group), rows)
    codes = pack_nibbles(codes_NK) if bits == 4 else codes_NK
    tensors = {"codes": reorder_codes(codes, order, bits), "scale": scale.t()}
    symmetric = bool((zero_NG == 1 << (bits - 1)).all())
    if not symmetric:
        tensors["zero"] = zero_NG
    return PackedRows(
        format=IntGroups(bits=bits, group=group, zeros=not symmetric),
        rows={name: tensor.contiguous() for name, tensor in tensors.items()},
        columns=columns,
        order_K=order,
    )
