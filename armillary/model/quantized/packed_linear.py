"""Linear layers and embeddings over packed weights: some rows at a time are dequantised, used and dropped; on a GPU
kernels that read the packed weight take their place for a few tokens."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.quantized.packed_kernels import PackedKernel
from armillary.model.quantized.packed_rows import FusedRows, PackedRows

# T tokens, N outputs, K inputs

_BLOCK_NUMBERS = 1 << 20
"""weights dequantised at a time: 4 MB in fp32, which stays in the caches of most CPUs"""
_GPU_BLOCK_NUMBERS = 1 << 24
"""fewer and larger kernels"""


class PackedLinear(nn.Module):
    """x @ weightᵀ + bias; memory is that of the packed weight and one block of rows."""

    def __init__(self, weight: FusedRows, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.kernels: tuple[PackedKernel | None, ...] = (None,) * len(weight.parts)
        self._run: Callable[[Tensor], Tensor] | None = None

    def use_kernels(self, dtype: torch.dtype) -> None:
        """From here on inputs of `dtype` go through the kernels that were chosen for this weight on its device; 4-bit
        codes are reordered for them, once."""
        self.kernels = tuple(PackedKernel.of(part, dtype) for part in self.weight.parts)
        both = zip(self.kernels, self.weight.parts, strict=True)
        parts = tuple(part if kernel is None else kernel.part for kernel, part in both)
        self.weight = replace(self.weight, parts=parts)

    def forward(self, x: Tensor) -> Tensor:
        if self._run is not None:
            return self._run(x)
        with_gradient = torch.is_grad_enabled() and x.requires_grad
        y = _with_gradient(x, self) if with_gradient else self.multiplied(x)
        return y if self.bias is None else y + self.bias

    def multiplied(self, x: Tensor) -> Tensor:
        """x @ weightᵀ."""
        both = zip(self.kernels, self.weight.parts, strict=True)
        outputs = [kernel(x) if kernel and kernel.takes(x) else _matmul(x, part) for kernel, part in both]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if self.weight.order_N is None else y.index_select(-1, self.weight.order_N)

    @property
    def can_fuse(self) -> bool:
        """Whether one token may go through `run_fused`."""
        kernel = self.kernels[0] if len(self.kernels) == 1 else None
        return self.weight.order_N is None and kernel is not None and kernel.can_fuse

    def run_fused(self, x: Tensor, norm: Tensor | None, residual: Tensor | None, eps: float, gated: bool) -> Tensor:
        """residual + act(norm(x) @ weightᵀ + bias) of one token, each part only where it is given."""
        (kernel,) = self.kernels
        assert kernel is not None
        return kernel.run_fused(x, norm, residual, eps, gated, self.bias)

    def multiplied_back(self, y: Tensor) -> Tensor:
        """y @ weight: the gradient of the inputs."""
        if self.weight.order_N is not None:
            y = torch.empty_like(y).index_copy_(-1, self.weight.order_N.long(), y)
        sizes = [part.num_rows for part in self.weight.parts]
        sums = [_matmul_back(rows, part) for rows, part in zip(y.split(sizes, -1), self.weight.parts, strict=True)]
        return torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]

    def free(self, run: Callable[[Tensor], Tensor] | None = None) -> None:
        """Drop the weight, which is held in another form; calls go to `run` from here on."""
        self.weight, self.kernels, self._run = FusedRows(parts=()), (), run


class _Multiplied(torch.autograd.Function):
    """`PackedLinear.multiplied` with the gradient of its inputs; nothing dequantised is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: PackedLinear) -> Tensor:
        ctx.linear = linear
        return linear.multiplied(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.linear.multiplied_back(dy), None


@torch.compiler.disable
def _with_gradient(x: Tensor, linear: PackedLinear) -> Tensor:
    return _Multiplied.apply(x, linear)  # type: ignore[no-any-return]


class PackedEmbedding(nn.Module):
    """Rows of a packed matrix by token; `linear` is the head tied to it."""

    def __init__(self, weight: PackedRows, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.linear = PackedLinear(FusedRows(parts=(weight,)))
        self._rows: Callable[[Tensor], Tensor] | None = None

    def use_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """From here on rows come from there: the weight is held in another form."""
        self._rows = rows

    def forward(self, tokens: Tensor) -> Tensor:
        rows, read = tokens.flatten(), self._rows
        if read is None:
            (weight,) = self.linear.weight.parts
            return weight.select(rows).dequantised().to(self.dtype).view(*tokens.shape, -1)
        return read(rows).to(self.dtype).view(*tokens.shape, -1)


def _matmul(x: Tensor, part: PackedRows) -> Tensor:
    """[…, N], a block of rows at a time."""
    if part.order_K is not None:
        x = x.index_select(-1, part.order_K)
        part = replace(part, order_K=None)
    return torch.cat([F.linear(x, block.stored_order().to(x.dtype)) for block in _blocks(part, x)], dim=-1)


def _matmul_back(y: Tensor, part: PackedRows) -> Tensor:
    """[…, K], a block of rows at a time, summed in fp32."""
    total, row = torch.zeros(*y.shape[:-1], part.columns, dtype=torch.float32, device=y.device), 0
    for block in _blocks(replace(part, order_K=None), y):
        total += y[..., row : row + block.num_rows] @ block.stored_order().to(y.dtype)
        row += block.num_rows
    if part.order_K is not None:
        total = torch.empty_like(total).index_copy_(-1, part.order_K.long(), total)
    return total.to(y.dtype)


def _blocks(part: PackedRows, x: Tensor) -> Iterator[PackedRows]:
    """Rows that are dequantised together."""
    step = max(1, (_BLOCK_NUMBERS if x.device.type == "cpu" else _GPU_BLOCK_NUMBERS) // part.columns)
    return (part.select(slice(row, row + step)) for row in range(0, part.num_rows, step))


def packed_modules(model: nn.Module) -> list[PackedLinear]:
    """Every packed layer of a model, a packed embedding's too."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def loaded_bytes(model: nn.Module) -> int:
    """Memory of all weights, packed ones as they are."""
    plain = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return plain + sum(module.weight.nbytes for module in packed_modules(model))
