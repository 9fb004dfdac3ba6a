"""A linear layer over packed weights. For a few tokens its time is that of reading codes and scales once.

Codes of 8 bits lie as they are published, a byte per column. Codes of 4 bits lie in words that a kernel unpacks with
few instructions: in each block of 128 columns, word i of 16 holds columns 32·j + 2·i + h at the nibble j + 4·h, so that
the inputs of one nibble pair are 32 bits that lie beside those of the next word's. GGUF's K-quants have blocks of 32
columns, word i of 4 with columns 8·j + 2·i + h, so that four words, which are one thread's, have one scale: `k_quants`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.gemm.skinny import reference as small_linear
from armillary.kernels.quantized import k_quants

# M tokens, K inputs, N outputs, G groups of inputs with one scale each

PackedFormat = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4", "table", "q4_k", "q5_k", "q6_k"]
"""table: 4-bit codes into a table of 16 numbers, as bitsandbytes' nf4"""
EIGHT_BITS = ("int8", "fp8")
K_QUANTS = ("q4_k", "q5_k", "q6_k")
MAX_TOKENS = 64
"""most tokens for which packed weights are multiplied as they are; for more they are dequantised"""
SPAN = 16
"""words in one block of 4-bit codes"""
BLOCK = 8 * SPAN
"""columns in it"""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, by code (OCP Microscaling Formats 1.0, table 5)"""
_SPREAD = {"int4": 4.0, "int8": 64.0, "fp8": 64.0, "mxfp4": 3.0, "nvfp4": 3.0}  # of random codes
_CHECKED_ROWS = 256  # of a weight in the agreement check: rows do not depend on each other


class WeightFormat(NamedTuple):
    """A packed weight's format, as kernels are compiled for it."""

    kind: PackedFormat
    group: int  # columns with one scale; 0: the whole row
    zeros: bool = False

    def of_row(self, columns: int) -> int:
        """Columns with one scale in rows of so many."""
        return self.group or columns


def to_words(codes_NK: Tensor, span: int = SPAN) -> Tensor:
    """[N, K / 8] int32 of 4-bit codes, one per byte; K is a multiple of 8 · span."""
    blocks = codes_NK.unflatten(1, (-1, 4, span, 2)).int()  # block, j, i, h
    shifts = 4 * torch.arange(4, device=codes_NK.device)[:, None, None] + 16 * torch.arange(2, device=codes_NK.device)
    return (blocks << shifts.int()).sum((2, 4), dtype=torch.int32).flatten(1)


def from_words(words_NW: Tensor, span: int = SPAN) -> Tensor:
    """[N, 8·W] codes, one per byte."""
    shifts = 4 * torch.arange(4, device=words_NW.device)[:, None, None] + 16 * torch.arange(2, device=words_NW.device)
    blocks = words_NW.unflatten(1, (-1, 1, span, 1)) >> shifts.int() & 15
    return blocks.to(torch.uint8).flatten(1)


def nibbles(packed_nB: Tensor) -> Tensor:
    """[n, 2B] codes of bytes with the low nibble first."""
    return torch.stack((packed_nB & 15, packed_nB >> 4), dim=-1).flatten(-2)


def dequantised(
    codes: Tensor, scale: Tensor, zero: Tensor | None, kind: PackedFormat, group: int, *, words: bool = True
) -> Tensor:
    """[N, K] in fp32, or in fp64 where the scale is in it. Codes of 4 bits are in `words`, or in bytes."""
    dtype = scale.dtype if scale.dtype == torch.float64 else torch.float32
    if kind in K_QUANTS:
        low_NK = from_words(k_quants.low_words(codes, kind), k_quants.SPAN)
        return k_quants.dequantised(low_NK, codes, scale, kind, dtype)
    unpack = from_words if words else nibbles
    if kind == "table":
        assert zero is not None
        return zero.to(dtype)[unpack(codes).int()] * _spread(scale.to(dtype), group, 8 * codes.shape[1])
    numbers = _numbers(codes, kind, unpack).to(dtype)
    if kind in ("int4", "int8"):
        middle = 1 << (3 if kind == "int4" else 7)
        numbers = numbers - (middle if zero is None else _spread(zero.to(dtype), group, numbers.shape[1]))
    if kind == "mxfp4":
        return torch.ldexp(numbers, _spread(scale.int() - 127, group, numbers.shape[1]))
    factor = scale.view(torch.float8_e4m3fn).to(dtype) / zero if kind == "nvfp4" else scale.to(dtype)
    return numbers * _spread(factor, group, numbers.shape[1])


def _numbers(codes: Tensor, kind: PackedFormat, unpack: Callable[[Tensor], Tensor]) -> Tensor:
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn)
    if kind == "int8":
        return codes
    unpacked = unpack(codes)
    return unpacked if kind == "int4" else torch.tensor(FP4, device=codes.device)[unpacked.int()]


def _spread(of_group_NG: Tensor, group: int, columns: int) -> Tensor:
    if of_group_NG.shape[1] == 1:
        return of_group_NG
    return of_group_NG.repeat_interleave(group, dim=1)[:, :columns]


def reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: PackedFormat,
    group: int,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """residual + act(norm(x) @ weightᵀ + bias), each part only where it is given, the weight in x's dtype. `scale`
    [N, G], or [N, 1] for whole rows; `zero` of int codes likewise, None: the middle; for nvfp4 the divisor [N, 1] of
    the scales, for a table its 16 numbers. Scales of mxfp4 are exponents, of nvfp4 E4M3, of K-quants bytes of two
    levels."""
    weight_NK = dequantised(codes, scale, zero, kind, group).to(x.dtype)
    return small_linear(x, weight_NK, norm_K, residual, eps, gated, bias_N)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyCase(Case):
    """A few tokens through a packed weight."""

    tokens: int
    outputs: int
    inputs: int
    kind: PackedFormat = "int4"
    group: int = 128  # inputs with one scale; `inputs` for one scale per row
    zeros: bool = False
    fused: bool = False  # an RMS norm before, bias and residual after, and SwiGLU where outputs are even


def inputs(case: WeightOnlyCase, generator: torch.Generator) -> tuple[object, ...]:
    x = case.normal(generator, case.tokens, case.inputs)
    codes, scale, zero = random_weight(case, generator)
    codes = codes if case.kind in (*EIGHT_BITS, *K_QUANTS) else to_words(codes)
    packed = (x, codes, scale, zero, case.kind, case.group)
    return packed + _around(case, generator) if case.fused else packed


def random_weight(case: WeightOnlyCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, one per byte, scales, zeros)."""
    device, (N, K) = generator.device, (case.outputs, case.inputs)
    if case.kind in K_QUANTS:
        return (*k_quants.random_weight(case.kind, (N, K), generator), None)
    groups = -(-K // case.group)
    bits = 8 if case.kind in EIGHT_BITS else 4
    codes = torch.randint(0, 1 << bits, (N, K), generator=generator, device=device, dtype=torch.uint8)
    if case.kind == "fp8":
        codes = torch.where(codes & 127 > 119, codes & 0x8F, codes)  # neither NaN nor very large
    spread = _SPREAD.get(case.kind, 1.0) * K**0.5
    random = torch.rand(N, groups, generator=generator, device=device)
    scale, zero = ((random + 0.5) / spread).half() if case.kind != "fp8" else (random + 0.5) / spread, None
    if case.kind == "mxfp4":
        scale = torch.randint(116, 122, (N, groups), generator=generator, device=device, dtype=torch.uint8)
    elif case.kind == "nvfp4":
        scale = (random * 400 + 1).to(torch.float8_e4m3fn).view(torch.uint8)
        zero = torch.full((N, 1), 200 * spread, device=device)
    elif case.kind == "table":
        zero = torch.linspace(-1, 1, 16, device=device)
    elif case.zeros:
        zero = torch.randint(0, 1 << bits, (N, groups), generator=generator, device=device, dtype=torch.uint8)
    return codes, scale, zero


def _around(case: WeightOnlyCase, generator: torch.Generator) -> tuple[object, ...]:
    """What is fused: norm, residual, epsilon, gate, bias."""
    gated = case.outputs % 2 == 0
    width = case.outputs // 2 if gated else case.outputs
    norm, bias = case.normal(generator, case.inputs), case.normal(generator, case.outputs)
    return norm, case.normal(generator, case.tokens, width), 1e-6, gated, bias


def work(case: WeightOnlyCase) -> OpWork:
    """Codes, scales and x are read once, and the result is written once."""
    return OpWork(flops=2.0 * case.tokens * case.outputs * case.inputs, bytes=float(bytes_read(case)), ceiling="read")


def bytes_read(case: WeightOnlyCase) -> int:
    return weight_bytes(case) + case.torch_dtype.itemsize * case.tokens * (case.inputs + case.outputs)


def weight_bytes(case: WeightOnlyCase) -> int:
    """Codes, scales and zeros."""
    if case.kind in K_QUANTS:
        return case.outputs * k_quants.row_bytes(case.kind, case.inputs)
    codes = case.outputs * case.inputs // (1 if case.kind in EIGHT_BITS else 2)
    per_scale = {"int4": 2, "int8": 2, "fp8": 4, "mxfp4": 1, "nvfp4": 1, "table": 2}[case.kind] + case.zeros
    return codes + case.outputs * -(-case.inputs // case.group) * per_scale


def refuses(case: WeightOnlyCase) -> str | None:
    if case.dtype not in ("bf16", "fp16"):
        return "it is for inputs of 16 bits"
    return unsupported(case.kind, case.group, case.inputs)


def unsupported(kind: PackedFormat, group: int, columns: int) -> str | None:
    """Why the kernels do not take rows of `columns` codes in groups of `group`, or None."""
    if columns % (k_quants.BLOCK if kind in K_QUANTS else BLOCK):
        return f"rows are no multiple of {k_quants.BLOCK if kind in K_QUANTS else BLOCK} columns"
    if kind in K_QUANTS:
        return None
    if group < columns and (group & (group - 1) or group < 16 or (group < 32 and kind != "nvfp4")):
        return f"groups of {group} columns"
    return None


_BENCHED: tuple[tuple[PackedFormat, int], ...] = (("int4", 128), ("int8", 0), ("fp8", 0))
WEIGHT_ONLY = Op(
    name="weight_only_linear",
    reference=reference,
    versions=(in_triton("quantized.weight_only_triton", "weight_only_linear", refuses=refuses),),
    inputs=inputs,
    work=work,
    tolerance={"bf16": 2e-2, "fp16": 2e-2},
    small=lambda case: replace(case, outputs=min(case.outputs, _CHECKED_ROWS)),
    cases={
        f"{kind} {name} {tokens}": WeightOnlyCase(
            tokens=tokens, outputs=outputs, inputs=width, kind=kind, group=group or width
        )
        for kind, group in _BENCHED
        for tokens in (1, 8)
        for name, outputs, width in (("gate and up", 28672, 4096), ("down", 4096, 14336))
    },
)
