"""Formats of the engine's linear layers: packed bf16 and int8 weights on a CPU, fp8 weights on a GPU.

PackedDense keeps bf16 weights in the layout of the CPU's matrix units (oneDNN), packed once when the engine starts:
torch's own GEMM packs them in every call, which for a few tokens takes longer than the GEMM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from armillary.engine.runner.forward import Forward, no_reduce
from armillary.engine.runner.latent_layer import Joined
from armillary.engine.runner.layer import free_weights, linears_of, replace_linear_fns
from armillary.engine.runner.linear.linear_fn import Dense, LinearFn
from armillary.engine.runner.linear.native_linear import NativeLinear, native_int8
from armillary.engine.runner.linear.packed_cpu import IntegerLinear, IntegerPart
from armillary.errors import BadInput
from armillary.kernels.core.choose_version import choose
from armillary.kernels.core.requirements import lacking
from armillary.kernels.fp8.linear import E4M3, quantised
from armillary.kernels.fp8.matmul import FP8_MATMUL, Fp8MatmulCase
from armillary.kernels.native.few_rows import FewRows
from armillary.kernels.native.half_weight import HalfWeight
from armillary.kernels.native.library import library
from armillary.kernels.quantized.integer_weights_cpu import Int8Weight, takes_int8
from armillary.model.quantized.formats import IntGroups
from armillary.model.quantized.packed_linear import PackedEmbedding, PackedLinear
from armillary.model.transformer import Transformer
from armillary.parallel.collectives import Group, all_reduce

_PLAIN_LOOP = 20.0  # times slower than fp32: int8 units are as fast or faster, plain loops are hundreds of times slower
Make = Callable[[Tensor, Tensor | None], LinearFn]  # (weight, bias) -> linear function


class PackedDense:
    """x @ weightᵀ + bias. With `plain`, the unpacked weight is kept too: for a single token it is a fifth faster."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None = None, *, plain: bool = False) -> None:
        self._ops: Any = torch.ops.mkldnn
        self._packed = self._ops._reorder_linear_weight(weight_NK.detach(), None)
        self._plain_NK = weight_NK.detach() if plain else None
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain_NK is None or len(x) != 1:
            return self._ops._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        y = torch.mv(self._plain_NK, x[0])
        return (y if self._bias is None else y + self._bias)[None]


def packs(weight: Tensor) -> bool:
    """Whether this CPU and build of torch support packed bf16 weights."""
    ops: Any = torch.ops.mkldnn
    known = torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")
    here = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return bool(known and here and ops._is_mkldnn_bf16_supported())


def replace_linears(forward: Forward, make: Make, *, let_go: bool) -> None:
    """Replace the linear functions of all layers but routers and experts; `let_go` frees the model's own weights."""
    for layer, block in zip(forward.layers, forward.model.blocks.values(), strict=True):
        replace_linear_fns(layer, lambda linear: _made(linear, make))
        if let_go:
            free_weights(*linears_of(block))


def replace_head(forward: Forward, make: Make, *, let_go: bool) -> None:
    """The same for the head, unless it is sharded over ranks or packed."""
    model = forward.model
    if not forward.has_head:
        return
    if forward.reduce is no_reduce and not isinstance(model.output or model.embedding, PackedLinear | PackedEmbedding):
        forward.head = _head(forward.model, make)
        if let_go and forward.model.output is not None:
            free_weights(forward.model.output)


def _made(linear: LinearFn, make: Make) -> LinearFn:
    """Packed weights, and int8 ones of a W8A8 checkpoint, stay as they are."""
    if isinstance(linear, Joined):
        return linear.replaced(lambda part: _made(part, make))
    return make(linear.weight, linear.bias) if isinstance(linear, Dense) else linear


def _head(model: Transformer, make: Make) -> LinearFn:
    """`Transformer.head` with another linear function."""
    linear = make(*model.head_weights())
    return lambda x: model.scaled_logits(linear(x))


class Int8Dense:
    """x @ weightᵀ + bias with both factors in int8 on a CPU: a scale per row of the weight and per token, sums in
    int32. The output does not depend on other rows of the batch."""

    @classmethod
    def rounded(cls, weight_NK: Tensor, bias: Tensor | None = None) -> Int8Dense:
        """Of a plain weight."""
        weight = Int8Weight.rounded(weight_NK.detach())
        return cls(weight.codes_NK, weight.scale_N, bias)

    def __init__(self, rounded_NK: Tensor, scale_N: Tensor, bias: Tensor | None = None) -> None:
        self.scale_N = scale_N
        self._ops: Any = torch.ops.onednn if has_onednn() and onednn_is_exact() else None
        if self._ops is not None:
            self._packed = self._ops.qlinear_prepack(rounded_NK, None)
            self._zeros_N = torch.zeros(len(rounded_NK), dtype=torch.int32)
        else:
            self._weight_KN = rounded_NK.t()
        self.bias = bias
        self.row_max: Callable[[Tensor], Tensor] | None = None
        """where inputs are shards of rows: the largest numbers of whole rows, out of the shards'"""

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        most_T1 = wide.abs().amax(dim=-1, keepdim=True)
        most_T1 = most_T1 if self.row_max is None else self.row_max(most_T1)
        scale_T1 = most_T1.clamp_min(1e-12) / 127
        y = self._matmul((wide / scale_T1).round().to(torch.int8)) * scale_T1
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _matmul(self, rounded_TK: Tensor) -> Tensor:
        """int32 sums times the weight's scales, in fp32."""
        if self._ops is None:
            return int8_matmul(rounded_TK, self._weight_KN) * self.scale_N
        return _onednn_matmul(self._ops, rounded_TK, self._packed, self.scale_N, self._zeros_N)


def _onednn_matmul(ops: Any, rounded_TK: Tensor, packed: Tensor, scale_N: Tensor, zeros_N: Tensor) -> Tensor:
    return ops.qlinear_pointwise(  # type: ignore[no-any-return]
        rounded_TK, 1.0, 0, packed, scale_N, zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
    )


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's int8 GEMM."""
    ops: Any = torch.ops.onednn
    return torch.backends.mkldnn.is_available() and hasattr(ops, "qlinear_pointwise")


def int8_matmul(a_TK: Tensor, b_KN: Tensor) -> Tensor:
    """int8 GEMM with fp32 result; computed in fp32 where the CPU's int8 GEMM would saturate."""
    return torch._int_mm(a_TK, b_KN).float() if int_mm_is_exact() else a_TK.float() @ b_KN.float()


@cache
def int_mm_is_exact() -> bool:
    """Whether torch's int8 GEMM sums in int32 on this CPU, shown by the largest numbers there are."""
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 127 * 127 * 64).all())


@cache
def onednn_is_exact() -> bool:
    """Whether oneDNN sums these products in int32. Without VNNI, AVX2 adds pairs in 16 bits, where large ones saturate:
    shown by the largest numbers there are."""
    ops: Any = torch.ops.onednn
    rows, columns, depth = 4, 16, 64
    x_TK, weight_NK = (torch.full((size, depth), 127, dtype=torch.int8) for size in (rows, columns))
    scale_N, zeros_N = torch.ones(columns), torch.zeros(columns, dtype=torch.int32)
    sums = _onednn_matmul(ops, x_TK, ops.qlinear_prepack(weight_NK, None), scale_N, zeros_N)
    return bool((sums == 127 * 127 * depth).all())


@cache
def int8_is_fast() -> bool:
    """Whether int8 GEMMs of this CPU and build are no plain loops, which oneDNN has for CPUs without int8 units: 300
    times slower than fp32 with AVX-512 but no VNNI. One is timed against fp32, large enough that calls do not count."""
    x, weight = torch.linspace(-1, 1, 32 * 512).view(32, 512), torch.linspace(-1, 1, 512 * 512).view(512, 512)
    dense, codes = Int8Dense.rounded(weight), x.mul(127).to(torch.int8)
    return _best_of_three(lambda: dense._matmul(codes)) < _PLAIN_LOOP * _best_of_three(lambda: torch.mm(x, weight))


@dataclass(frozen=True, kw_only=True)
class Int8Units:
    """What multiplies inputs in int8 here. Ranks that divide a row round its inputs together or not at all, so all of
    a group take what all of them have."""

    native: bool  # the C++ kernels
    fast: bool  # oneDNN

    @classmethod
    def here(cls) -> Int8Units:
        return cls(native=library() is not None, fast=int8_is_fast())

    @classmethod
    def of_all(cls, group: Group) -> Int8Units:
        here = cls.here()
        native, fast = all_reduce(torch.tensor([here.native, here.fast], dtype=torch.int32), group, "min").tolist()
        return cls(native=bool(native), fast=bool(fast))


def _best_of_three(call: Callable[[], Tensor]) -> float:
    call()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def share_row_max(forward: Forward, row_max: Callable[[Tensor], Tensor]) -> None:
    """Projections whose inputs are divided over ranks round them by the largest number of the whole row, as one rank
    does: with scales of their own, ranks would give other tokens."""
    for linear in (each for layer in forward.layers for each in (layer.out, layer.down)):
        if isinstance(linear, Int8Dense | NativeLinear):
            linear.row_max = row_max


def int8_linear(weight_NK: Tensor, bias: Tensor | None = None, *, units: Int8Units | None = None) -> LinearFn:
    """A plain weight in int8; inputs are rounded too where that is fast."""
    units = units or Int8Units.here()
    if units.native and (native := native_int8(weight_NK, bias)) is not None:
        return native
    outputs, inputs = weight_NK.shape
    if units.fast or not takes_int8(outputs, inputs, weight_NK.dtype):
        return Int8Dense.rounded(weight_NK, bias)
    part = IntegerPart(weight=Int8Weight.rounded(weight_NK.detach()), order_K=None)
    return IntegerLinear((part,), None, bias)


def few_rows_linear(weight_NK: Tensor, bias: Tensor | None = None) -> LinearFn:
    """A weight in fp32, through its own kernel for a few tokens."""
    return FewRows.of(weight_NK, bias) or Dense(weight_NK, bias)


def half_linear(weight_NK: Tensor, bias: Tensor | None = None) -> LinearFn:
    """A weight in fp32 that bf16 holds exactly, in bf16; others as they are."""
    return HalfWeight.of(weight_NK, bias) or Dense(weight_NK, bias)


def run_int8(forward: Forward, units: Int8Units, *, let_go: bool) -> None:
    """Packed int8 layers whose checkpoint wants int8 inputs too (W8A8) become `Int8Dense` where that is fast; `let_go`
    frees the model's own copy."""

    def replaced(linear: LinearFn) -> LinearFn:
        if isinstance(linear, Joined):
            return linear.replaced(replaced)
        if not isinstance(linear, PackedLinear) or not _is_w8a8(linear) or not units.fast:
            return linear
        (part,) = linear.weight.parts
        codes_NK = (part.rows["codes"] ^ 128).view(torch.int8)
        dense = Int8Dense(codes_NK, part.rows["scale"].flatten().float(), linear.bias)
        if let_go:
            linear.free()
        return dense

    for layer in forward.layers:
        replace_linear_fns(layer, replaced)


def _is_w8a8(linear: PackedLinear) -> bool:
    if len(linear.weight.parts) != 1 or linear.weight.parts[0].order_K is not None:
        return False
    (part,) = linear.weight.parts
    return isinstance(part.format, IntGroups) and part.format.int8_activations


Matmul = Callable[..., Tensor]  # `armillary.kernels.fp8.matmul.reference`, or a faster one


class Fp8Dense:
    """x @ weightᵀ + bias with both factors in E4M3: a scale per row of the weight and per token, sums in fp32. The
    weight is quantized once, when the engine starts; the output does not depend on other rows of the batch."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None, *, run: Matmul) -> None:
        weight, scale = quantised(weight_NK.detach(), E4M3, "row")
        self.weight_NK, self.scale_N1, self.bias, self._run = weight, scale.float(), bias, run

    def __call__(self, x: Tensor) -> Tensor:
        y = self._run(x, self.weight_NK, self.scale_N1)
        return y if self.bias is None else y + self.bias


def pick_fp8(weight: Tensor, tokens: int) -> Matmul:
    """The fp8 matmul for weights like this one; BadInput where the device has none."""
    if lacking(("fp8",), weight.device.type) or weight.dtype != torch.bfloat16:
        raise BadInput(
            "weights in fp8 are for bf16 models on a GPU of compute capability 8.9 or more; leave serve.weights=auto"
        )
    outputs, inputs = weight.shape
    case = Fp8MatmulCase(tokens=tokens, outputs=outputs, inputs=inputs, dtype="bf16", device="cuda")
    return choose(FP8_MATMUL, case, deterministic=True).run


def to_fp8(forward: Forward, run: Matmul, *, let_go: bool = False) -> None:
    """fp8 linear layers everywhere but in routers and experts; `let_go` frees the model's own weights."""
    forward.kernels = replace(forward.kernels, small=None)  # it takes plain weights
    replace_linears(forward, partial(Fp8Dense, run=run), let_go=let_go)
