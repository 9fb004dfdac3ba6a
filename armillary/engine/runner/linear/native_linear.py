"""Packed layers on a CPU through the C++ kernels, which multiply their codes as integers.

The engine puts each weight into the order of the kernels and frees the model's copy, so that it holds no more than the
file. Before that some rows of each weight are compared with plain torch: that they are dequantised alike, and that the
kernels give what the rounded inputs give. What does not agree stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from armillary.engine.runner.forward import Forward
from armillary.engine.runner.latent_layer import Joined
from armillary.engine.runner.layer import replace_linear_fns
from armillary.engine.runner.linear.linear_fn import LinearFn
from armillary.kernels.core.agreement import relative_error
from armillary.kernels.native import token_kernels
from armillary.kernels.native.library import library
from armillary.kernels.native.packed_weight import (
    CHUNK,
    PANEL,
    Codes,
    PackedWeight,
    dequantised,
    reference,
    refuses,
)
from armillary.kernels.quantized.integer_weights_cpu import Int8Weight
from armillary.model.quantized.integer_codes import codes_of, pieces
from armillary.model.quantized.packed_linear import PackedEmbedding, PackedLinear, packed_modules
from armillary.model.quantized.packed_rows import PackedRows

_GROWTH = 1.05
_TOLERANCE = 1e-4  # sums of the same numbers in another order: 3e-7 was seen
_CHECKED_TOKENS = (1, 5, 17)  # 16 of the last are a tile of matrix units


@dataclass(frozen=True, kw_only=True)
class NativePart:
    """A packed matrix of a linear layer."""

    weight: PackedWeight
    order_K: Tensor | None
    first: int  # its first output


class NativeLinear:
    """x @ weightᵀ + bias for x [M, K]."""

    def __init__(self, parts: tuple[NativePart, ...], outputs: int, bias: Tensor | None) -> None:
        self.parts, self.outputs = parts, outputs
        self.row_max: Callable[[Tensor], Tensor] | None = None
        """where inputs are shards of rows: the largest numbers of whole rows [M], out of the shards'"""
        self._per_token = any(part.weight.first_rows.inputs == "token" for part in parts)
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.dim() == 2:
            return self._multiplied(x)
        return self._multiplied(x.float().view(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], self.outputs)

    def _multiplied(self, x: Tensor) -> Tensor:
        y = torch.empty(x.shape[0], self.outputs)
        most_M = self.row_max(x.abs().amax(-1)) if self.row_max is not None and self._per_token else None
        for part in self.parts:
            inputs = x if part.order_K is None else x.index_select(-1, part.order_K)
            part.weight.into(inputs.contiguous(), y, self._bias, part.first, most_M)
        return y

    @property
    def nbytes(self) -> int:
        return sum(part.weight.nbytes for part in self.parts)


def run_native(forward: Forward, *, let_go: bool, per_token: bool = True) -> None:
    """Packed layers that the kernels take become `NativeLinear`, experts and head too; `let_go` frees the model's own
    copy. Without it nothing is replaced: the weights would be held twice. `per_token`: also those whose inputs are
    rounded by whole rows, which ranks must do together."""
    if not let_go or not packed_modules(forward.model) or library() is None:
        return
    native = partial(native_linear, per_token=per_token)
    for layer in forward.layers:
        replace_linear_fns(layer, native)
    model = forward.model
    for mixture in (layer.mixture for layer in forward.layers if layer.mixture is not None):
        for linear in packed_modules(mixture):
            native(linear)
    head = model.output if model.output is not None else model.embedding
    if isinstance(head, PackedEmbedding) and (tied := _native(head.linear, per_token)) is not None:
        head.use_rows(tied.parts[0].weight.select)
    elif isinstance(head, PackedLinear):
        native(head)


def run_native_tokens(forward: Forward) -> None:
    """Norms, gated SiLU, the write to the KV cache and attention of single tokens in C++ too, where there is a
    compiler."""
    if not token_kernels.agree():
        return
    if forward.into_cache is forward.kernels.qkv_cache:
        forward.into_cache = token_kernels.qkv_cache
    forward.kernels = replace(
        forward.kernels,
        norm=token_kernels.norm,
        add_norm=token_kernels.add_norm,
        activate=token_kernels.activate,
        qkv_cache=token_kernels.qkv_cache,
        tokens=token_kernels.attend_tokens,
    )


def native_int8(weight_NK: Tensor, bias: Tensor | None) -> NativeLinear | None:
    """A plain weight in int8, a scale per row; inputs are rounded per token. None where no kernel takes it."""
    outputs, inputs = weight_NK.shape
    if library() is None or outputs % PANEL or inputs % CHUNK:
        return None
    rounded = Int8Weight.rounded(weight_NK.detach())
    codes = Codes(
        codes_NK=rounded.codes_NK.view(torch.uint8) ^ 128,
        bits=8,
        group=inputs,
        scale_NG=rounded.scale_N[:, None],
        zero=128,
        inputs="token",
    )
    return NativeLinear((NativePart(weight=PackedWeight.of([codes]), order_K=None, first=0),), outputs, bias)


def native_linear(linear: LinearFn, *, per_token: bool = True) -> LinearFn:
    """In the order of the kernels where they take it, else as it is."""
    if isinstance(linear, Joined):
        return linear.replaced(partial(native_linear, per_token=per_token))
    native = _native(linear, per_token) if isinstance(linear, PackedLinear) else None
    return linear if native is None else native


def _native(linear: PackedLinear, per_token: bool) -> NativeLinear | None:
    """Frees the layer's own weight where it succeeds."""
    fused = linear.weight
    if not fused.parts or not all(_takes(part, per_token) for part in fused.parts):
        return None
    outputs, first, parts = sum(part.num_rows for part in fused.parts), 0, []
    order_N = None if fused.order_N is None else torch.argsort(fused.order_N)
    for part in fused.parts:
        order = None if order_N is None else order_N[first : first + part.num_rows]
        weight = PackedWeight.of(pieces(part), order)
        if weight.nbytes > _GROWTH * part.nbytes + 4 * part.num_rows:
            return None
        parts.append(NativePart(weight=weight, order_K=part.order_K, first=0 if order is not None else first))
        first += part.num_rows
    native = NativeLinear(tuple(parts), outputs, linear.bias)
    linear.free(native)
    return native


def _takes(part: PackedRows, per_token: bool) -> bool:
    """Whether the kernels take a weight, shown on its first rows."""
    some = part.select(slice(0, PANEL))
    codes = codes_of(some)
    if codes is None or part.num_rows % PANEL or refuses(codes) is not None:
        return False
    if codes.inputs == "token" and not per_token:
        return False
    stored = some.stored_order()
    if relative_error(dequantised(codes), stored.float()) > max(_TOLERANCE, torch.finfo(stored.dtype).eps):
        return False  # formats of 16 bits are dequantised in 16 bits, the kernels compute in fp32
    weight = PackedWeight.of([codes])
    x = torch.randn(max(_CHECKED_TOKENS), part.columns, generator=torch.Generator().manual_seed(0))
    return all(relative_error(weight(x[:some]), reference(x[:some], codes)) < _TOLERANCE for some in _CHECKED_TOKENS)
