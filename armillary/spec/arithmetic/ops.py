"""FLOPs and bytes of single operations, written once for the model, the profiler and the planner.

A multiply-add is 2 FLOPs; bytes are what must cross device memory if every operand is read once and every
result written once (compulsory traffic, the roofline's convention: Williams et al., CACM 2009). Attention is in
attention_ops, the operations around the GEMMs in non_gemm_ops, the list of a model in workload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from armillary.spec.hardware import DTYPE_BYTES

OpKind = Literal[
    "matmul",
    "conv",
    "attention",
    "norm",
    "softmax",
    "elementwise",
    "embedding",
    "loss",
    "optimizer",
    "reduction",
    "copy",
    "sampling",
    "collective",
]
MATRIX_KINDS = frozenset({"matmul", "conv", "attention"})
INDEX_BYTES = 8
"""token ids and indices are int64"""
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: its FLOPs (a multiply-add is two), and the bytes that must come from and go to device memory (for
    a collective: that are sent and received). `dtype` is that of the inputs."""

    name: str
    kind: OpKind
    flops: float
    bytes_read: float
    bytes_written: float
    dtype: str
    shape: tuple[int, ...] = ()
    """(batch, m, n, k) of a GEMM, on which its efficiency depends; else empty"""

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte: left of peak_flops / bandwidth the operation is memory-bound."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def on_matrix_units(self) -> bool:
        """Whether tensor cores (MXU, AMX …) do the arithmetic, so that their peak is the roofline."""
        return self.kind in MATRIX_KINDS


def size_of(dtype: str) -> float:
    """Bytes of one element."""
    return DTYPE_BYTES[dtype]


# --- GEMMs


def matmul(name: str, m: int, n: int, k: int, *, dtype: str, weight_dtype: str = "", out_dtype: str = "") -> Op:
    """[m, k] @ [k, n]: 2·m·n·k FLOPs (BLAS GEMM; a bias is fused and not counted). `weight_dtype` is the
    [k, n] operand's where it differs (weight-only quantisation)."""
    return batched_matmul(name, 1, m, n, k, dtype=dtype, weight_dtype=weight_dtype, out_dtype=out_dtype)


def batched_matmul(
    name: str, batch: int, m: int, n: int, k: int, *, dtype: str, weight_dtype: str = "", out_dtype: str = ""
) -> Op:
    """`batch` GEMMs [m, k] @ [k, n]: 2·batch·m·n·k FLOPs."""
    return Op(
        name=name,
        kind="matmul",
        flops=2 * batch * m * n * k,
        bytes_read=batch * (m * k * size_of(dtype) + k * n * size_of(weight_dtype or dtype)),
        bytes_written=batch * m * n * size_of(out_dtype or dtype),
        dtype=dtype,
        shape=(batch, m, n, k),
    )


def matmul_backward(op: Op) -> tuple[Op, Op]:
    """The two GEMMs of the backward pass: dX = dY @ Wᵀ and dW = Xᵀ @ dY, each as many FLOPs as the forward
    (so training costs 3 × forward: Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
    batch, m, n, k = op.shape
    return (
        batched_matmul(f"{op.name}.dx", batch, m, k, n, dtype=op.dtype),
        batched_matmul(f"{op.name}.dw", batch, k, n, m, dtype=op.dtype),
    )


def grouped_matmul(name: str, rows: int, n: int, k: int, *, groups: int, dtype: str, weight_dtype: str = "") -> Op:
    """`rows` rows over `groups` weights [k, n] (experts): 2·rows·n·k FLOPs, every weight with a row is
    read once (MegaBlocks, arXiv 2211.15841)."""
    used = min(groups, rows)
    return Op(
        name=name,
        kind="matmul",
        flops=2 * rows * n * k,
        bytes_read=rows * k * size_of(dtype) + used * k * n * size_of(weight_dtype or dtype),
        bytes_written=rows * n * size_of(dtype),
        dtype=dtype,
        shape=(used, -(-rows // used) if used else 0, n, k),
    )


def grouped_matmul_backward(name: str, rows: int, n: int, k: int, *, groups: int, dtype: str) -> tuple[Op, Op]:
    """dX reads every used weight again; dW writes the gradient of all `groups` (zeros where there is no row)."""
    dx = grouped_matmul(f"{name}.dx", rows, k, n, groups=groups, dtype=dtype)
    b = size_of(dtype)
    dw = Op(
        name=f"{name}.dw",
        kind="matmul",
        flops=2 * rows * n * k,
        bytes_read=rows * (k + n) * b,
        bytes_written=groups * k * n * b,
        dtype=dtype,
        shape=(dx.shape[0], k, n, dx.shape[1]),
    )
    return dx, dw


# --- convolutions


@dataclass(frozen=True, kw_only=True)
class Conv:
    """The shape of a 1-d or 2-d convolution: `size` and `kernel` have one number per dim, and a single `stride`,
    `padding` or `dilation` applies to all dims. Depthwise: groups = channels_in."""

    batch: int
    channels_in: int
    channels_out: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1

    @property
    def out(self) -> tuple[int, ...]:
        """floor((size + 2·padding − dilation·(kernel − 1) − 1) / stride) + 1, per dim."""
        stride, padding, dilation = (_spread(x, len(self.size)) for x in (self.stride, self.padding, self.dilation))
        return tuple(
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, k, t, p, d in zip(self.size, self.kernel, stride, padding, dilation, strict=True)
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Elements of input, weight and output."""
        return (
            self.batch * self.channels_in * prod(self.size),
            self.channels_out * self.channels_in // self.groups * prod(self.kernel),
            self.batch * self.channels_out * prod(self.out),
        )


def _spread(values: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return values * rank if len(values) == 1 else values


def conv(name: str, shape: Conv, *, dtype: str) -> Op:
    """2 · outputs · (channels_in / groups) · prod(kernel) FLOPs (direct convolution; Winograd does fewer)."""
    x, w, y = shape.counts
    b = size_of(dtype)
    return Op(
        name=name, kind="conv", flops=_conv_flops(shape), bytes_read=(x + w) * b, bytes_written=y * b, dtype=dtype
    )


def conv_backward(name: str, shape: Conv, *, dtype: str, input_grad: bool = True) -> tuple[Op, ...]:
    """Gradients of input (left out in a network's first layer) and of weight, each the forward's FLOPs."""
    x, w, y = shape.counts
    b, flops = size_of(dtype), _conv_flops(shape)
    dx = Op(name=f"{name}.dx", kind="conv", flops=flops, bytes_read=(y + w) * b, bytes_written=x * b, dtype=dtype)
    dw = Op(name=f"{name}.dw", kind="conv", flops=flops, bytes_read=(y + x) * b, bytes_written=w * b, dtype=dtype)
    return (dx, dw) if input_grad else (dw,)


def _conv_flops(shape: Conv) -> int:
    return 2 * shape.counts[2] * (shape.channels_in // shape.groups) * prod(shape.kernel)


# --- element by element


def elementwise(
    name: str,
    elements: int,
    *,
    dtype: str,
    inputs: int = 1,
    outputs: int = 1,
    flops_each: float = 1,
    out_dtype: str = "",
) -> Op:
    """`inputs` arrays read, `outputs` written, `flops_each` FLOPs per element (exp, tanh … count as one)."""
    return Op(
        name=name,
        kind="elementwise",
        flops=elements * flops_each,
        bytes_read=inputs * elements * size_of(dtype),
        bytes_written=outputs * elements * size_of(out_dtype or dtype),
        dtype=dtype,
    )


def copy(name: str, elements: int, *, dtype: str, out_dtype: str = "") -> Op:
    """A copy or cast: read once, written once, no arithmetic."""
    b, out = size_of(dtype), size_of(out_dtype or dtype)
    return Op(name=name, kind="copy", flops=0, bytes_read=elements * b, bytes_written=elements * out, dtype=dtype)


def reduction(name: str, elements: int, outputs: int = 1, *, dtype: str) -> Op:
    """One operation per element, `outputs` results (sum, max, norm)."""
    b = size_of(dtype)
    return Op(
        name=name, kind="reduction", flops=elements, bytes_read=elements * b, bytes_written=outputs * b, dtype=dtype
    )


def dropout(name: str, elements: int, *, dtype: str, mask: bool = False) -> Op:
    """Compare and scale; one byte of mask per element where it is stored, none where it is regenerated from a seed."""
    b = size_of(dtype)
    return Op(
        name=name,
        kind="elementwise",
        flops=2 * elements,
        bytes_read=elements * b,
        bytes_written=elements * (b + mask),
        dtype=dtype,
    )


def softmax(name: str, rows: int, columns: int, *, dtype: str, backward: bool = False) -> Op:
    """Forward max, subtract, exp, sum, divide: 5 per element, one read and one write (online softmax, Milakov &
    Gimelshein, arXiv 1805.02867). Backward p·(dy − Σ p·dy): 4 per element, two reads and one write."""
    n, b = rows * columns, size_of(dtype)
    return Op(
        name=name,
        kind="softmax",
        flops=(4 if backward else 5) * n,
        bytes_read=(2 if backward else 1) * n * b,
        bytes_written=n * b,
        dtype=dtype,
    )


def total(ops: Sequence[Op]) -> tuple[float, float]:
    """(FLOPs, bytes) of a list of operations."""
    return sum(op.flops for op in ops), sum(op.bytes for op in ops)
