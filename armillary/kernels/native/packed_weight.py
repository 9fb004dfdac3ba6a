"""Packed weights in the order of the C++ kernels, which multiply codes as integers (`packed_linear.cpp`).

y = x @ weightᵀ with weight = scale · (code - zero) - minimum. Inputs are rounded to int8, with the scales that
the format's own runtime has (llama.cpp for GGUF). `reference` is the definition in plain torch.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.native.library import library

# N outputs, K inputs, G groups of inputs with one scale each, P panels of 16 rows, C chunks of 32 columns, M tokens

PANEL, CHUNK, SUPER = 16, 32, 256
ScaleKind = Literal["fp32", "fp16", "bf16", "super", "e8m0", "e4m3"]
InputScales = Literal["chunk", "half chunk", "super", "token"]
"""inputs with one scale: 32; 32, in fp16 (llama.cpp's Q8_0); 256 (its Q8_K); all"""
_INPUTS: tuple[InputScales, ...] = ("chunk", "half chunk", "super", "token")
_SCALES: tuple[ScaleKind, ...] = ("fp32", "fp16", "bf16", "super", "e8m0", "e4m3")
_CHUNK_BYTES = {4: 256, 5: 320, 6: 384, 8: 512}
_FLOAT_KINDS: dict[torch.dtype, ScaleKind] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
FP4_TIMES_2 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1 values, doubled to be integers"""
_FP4_ZERO = 12


@dataclass(frozen=True, kw_only=True)
class Codes:
    """A weight before it is reordered."""

    codes_NK: Tensor  # uint8, one per byte
    bits: int  # 4, 5, 6 or 8
    group: int  # inputs with one scale; a multiple of 32, or 16 with 6 bits and fp4; K: a scale per row
    scale_NG: Tensor  # fp32, fp16, bf16; int8 or uint8 with `super_NS`; uint8 exponents (e8m0) or E4M3 codes of fp4
    zero: int = 0
    zero_NG: Tensor | None = None  # uint8 zero points
    minimum_NG: Tensor | None = None  # uint8, times `super_minimum_NS`
    super_NS: Tensor | None = None  # fp16: factor of the scales per 256 inputs; of e4m3: fp32 [N, 1]
    super_minimum_NS: Tensor | None = None  # fp16
    fp4: Literal["", "e8m0", "e4m3"] = ""  # codes are E2M1; the format of the scales
    inputs: InputScales = "chunk"  # how inputs are rounded

    @property
    def scale_kind(self) -> ScaleKind:
        if self.fp4:
            return self.fp4
        return "super" if self.super_NS is not None else _FLOAT_KINDS[self.scale_NG.dtype]

    @property
    def sums(self) -> int:
        """Inputs whose products are added up as integers."""
        return 16 if self.bits == 6 or self.group == 16 else CHUNK


def refuses(codes: Codes) -> str | None:
    """Why the kernels cannot take a weight, or None."""
    rows, columns = codes.codes_NK.shape
    if rows % PANEL or columns % CHUNK or not rows or not columns:
        return f"rows are taken in sixteens and columns in 32s, not {rows} × {columns}"
    if columns % codes.group or codes.group % codes.sums:
        return f"no kernel for groups of {codes.group} columns"
    if codes.bits == 8 and codes.zero not in (0, SUPER // 2):
        return f"codes of 8 bits count from 128 or 0, not {codes.zero}"
    if codes.group == 16 and not (codes.fp4 or codes.bits == 6):
        return "groups of 16 are for fp4 and 6 bits"
    if "super" in (codes.scale_kind, codes.inputs) and columns % SUPER:
        return "blocks of 256 columns"
    if codes.inputs == "token" and (codes.bits != 8 or codes.group != columns or codes.zero_NG is not None):
        return "inputs are rounded per token for 8 bits with a scale per row"
    return None


class _Struct(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("bits", "table", "scales", "minima", "zero")),
        *((name, ctypes.c_int32) for name in ("group", "inputs", "chunk_bytes")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "minimum", "super", "super_min", "order")),
        ("values", ctypes.c_uint8 * 16),
    )


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight in the order of the kernels. Call it with x [M, K] for x @ weightᵀ + bias in x's dtype."""

    rows: int
    columns: int
    tensors: dict[str, Tensor]  # what the struct points to
    first_rows: Codes  # for the format
    struct: _Struct = field(repr=False)
    kernels: Any = field(repr=False)

    @classmethod
    def of(cls, pieces: Iterable[Codes], order_N: Tensor | None = None) -> "PackedWeight":
        """Of pieces above each other, read one at a time; output n at place order[n], where given."""
        packed = []
        for codes in pieces:
            packed.append(_in_panels(codes))
        tensors = {name: torch.cat([piece[name] for piece in packed]) for name in packed[0]}
        rows, columns = PANEL * len(tensors["codes"]), codes.codes_NK.shape[1]
        if order_N is not None:
            tensors["order"] = order_N.int().contiguous()
        minima = 1 if codes.zero_NG is not None else 2 if codes.minimum_NG is not None else 0
        struct = _Struct(
            rows=rows,
            columns=columns,
            bits=codes.bits,
            table=bool(codes.fp4),
            scales=_SCALES.index(codes.scale_kind),
            minima=minima,
            zero=_FP4_ZERO if codes.fp4 else codes.zero,
            group=codes.group,
            inputs=_INPUTS.index(codes.inputs),
            chunk_bytes=_CHUNK_BYTES[codes.bits],
            values=(ctypes.c_uint8 * 16)(*(value + _FP4_ZERO for value in FP4_TIMES_2)),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        return cls(
            rows=rows, columns=columns, tensors=tensors, first_rows=_first_rows(codes), struct=struct, kernels=library()
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __call__(self, x_MK: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x_MK.float().contiguous()
        y = torch.empty(len(x), self.rows)
        self.into(x, y, bias)
        return y if x_MK.dtype == torch.float32 else y.to(x_MK.dtype)

    def select(self, rows_n: Tensor) -> Tensor:
        """[n, K] in fp32: some rows dequantised, as an embedding needs them."""
        panels, places = rows_n // PANEL, rows_n % PANEL
        some = torch.arange(len(rows_n))

        def of_rows(name: str) -> Tensor | None:
            tensor = self.tensors.get(name)
            return None if tensor is None else tensor[panels].transpose(1, 2)[some, places]

        codes = unpack_codes(self.tensors["codes"][panels], self.first_rows.bits)[some, places]
        lower, has_zeros = of_rows("minimum"), self.first_rows.zero_NG is not None
        scale, factor, minimum = of_rows("scale"), of_rows("super"), of_rows("super_min")
        assert scale is not None
        return dequantised(
            replace(
                self.first_rows,
                codes_NK=codes,
                scale_NG=scale,
                super_NS=factor,
                super_minimum_NS=minimum,
                zero_NG=lower if has_zeros else None,
                minimum_NG=None if has_zeros else lower,
            )
        )

    def into(
        self, x: Tensor, y: Tensor, bias: Tensor | None = None, first: int = 0, most_M: Tensor | None = None
    ) -> None:
        """The same in fp32 into columns of `y` from `first` on. `most_M`: where inputs have a scale per token, the
        largest absolute value of each row, of which x may be a part."""
        bias_at = None if bias is None else bias.data_ptr() + 4 * first
        most_at = None if most_M is None else most_M.data_ptr()
        self.kernels.armillary_linear(
            ctypes.addressof(self.struct),
            x.data_ptr(),
            x.shape[0],
            most_at,
            bias_at,
            y.data_ptr() + 4 * first,
            y.stride(0),
            torch.get_num_threads(),
        )


def pack_codes(codes_NK: Tensor, bits: int) -> Tensor:
    """[P, C, bytes]: of each panel and chunk eight vectors with four columns of 16 rows; with 4 bits the last four
    vectors are in the upper halves of the first four; bits 5 and 6 of all eight follow."""
    vectors = codes_NK.view(-1, PANEL, codes_NK.shape[1] // CHUNK, 8, 4).permute(0, 2, 3, 1, 4).flatten(3)
    if bits == 8:
        return vectors.contiguous()
    packed = [(vectors[:, :, :4] & 15) | (vectors[:, :, 4:] & 15) << 4]
    if bits > 4:
        per_byte = 8 // (bits - 4)
        upper = (vectors >> 4).unflatten(2, (-1, per_byte))
        shifts = torch.arange(per_byte, dtype=torch.uint8)[:, None] * (bits - 4)
        packed.append((upper << shifts).sum(3, dtype=torch.uint8))
    return torch.cat(packed, dim=2).contiguous()


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse: [P, 16, K]."""
    if bits == 8:
        return _columns(packed)
    low = packed[:, :, :4]
    vectors = torch.cat((low & 15, low >> 4), dim=2)
    if bits > 4:
        per_byte = 8 // (bits - 4)
        shifts = torch.arange(per_byte, dtype=torch.uint8)[:, None] * (bits - 4)
        upper = (packed[:, :, 4:, None] >> shifts) & ((1 << (bits - 4)) - 1)
        vectors |= upper.flatten(2, 3) << 4
    return _columns(vectors)


def _columns(vectors: Tensor) -> Tensor:
    """[P, C, 8, 64] -> [P, 16, K]"""
    return vectors.unflatten(3, (PANEL, 4)).permute(0, 3, 1, 2, 4).flatten(2)


def _first_rows(codes: Codes) -> Codes:
    tensors = {name: value[:1].clone() for name, value in vars(codes).items() if isinstance(value, Tensor)}
    return replace(codes, **tensors)


def _in_panels(codes: Codes) -> dict[str, Tensor]:
    lower = codes.zero_NG if codes.minimum_NG is None else codes.minimum_NG
    optional = {"minimum": lower, "super": codes.super_NS, "super_min": codes.super_minimum_NS}
    tensors = {"codes": pack_codes(codes.codes_NK, codes.bits), "scale": _by_panel(codes.scale_NG)}
    return tensors | {name: _by_panel(tensor) for name, tensor in optional.items() if tensor is not None}


def _by_panel(of_NG: Tensor) -> Tensor:
    return of_NG.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def dequantised(codes: Codes) -> Tensor:
    """[N, K] in fp32: the definition."""
    columns = codes.codes_NK.shape[1]

    def spread(of_NG: Tensor) -> Tensor:
        return of_NG.float().repeat_interleave(columns // of_NG.shape[1], dim=1)

    scale_NK = spread(codes.scale_NG)
    if codes.fp4:
        values = torch.tensor(FP4_TIMES_2, dtype=torch.float32)[codes.codes_NK.int()]
        if codes.fp4 == "e8m0":
            return torch.ldexp(values / 2, scale_NK - 127)
        assert codes.super_NS is not None
        return values * spread(codes.scale_NG.view(torch.float8_e4m3fn)) * codes.super_NS
    if codes.super_NS is not None:
        scale_NK = scale_NK * spread(codes.super_NS)
    zero = codes.zero if codes.zero_NG is None else spread(codes.zero_NG)
    weight_NK = (codes.codes_NK.float() - zero) * scale_NK
    if codes.minimum_NG is not None:
        assert codes.super_minimum_NS is not None
        weight_NK = weight_NK - spread(codes.minimum_NG) * spread(codes.super_minimum_NS)
    return weight_NK


def rounded(x_MK: Tensor, inputs: InputScales) -> Tensor:
    """Inputs as the kernels round them."""
    width = {"super": SUPER, "token": x_MK.shape[-1]}.get(inputs, CHUNK)
    runs = x_MK.float().unflatten(-1, (-1, width))
    most = runs.abs().amax(dim=-1, keepdim=True)
    scale, inverse = most / 127, torch.where(most > 0, 127 / most, 0.0)
    if inputs == "half chunk":
        scale = scale.half().float()
    codes = (runs.double() * inverse.double()).round()  # the kernels' fused multiply-add has no rounding in between
    return (codes.float() * scale).view(x_MK.shape)


def reference(x_MK: Tensor, codes: Codes) -> Tensor:
    """What a `PackedWeight` computes, in plain torch."""
    return F.linear(rounded(x_MK, codes.inputs), dequantised(codes))
