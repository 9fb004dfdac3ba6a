"""Linear layers of many experts at once: rows sorted by expert, each stretch of them times its expert's weight.

`ends[e]` is where the rows of expert e end; they begin where those of e - 1 do. The reference waits for the device to
tell how many rows each expert has; the kernels read that on the device, so nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.op import Case, LazyFunction, Op, OpWork, Version, refuses_fp64, rows_to_check
from armillary.machine.accelerator import accelerator_of
from armillary.spec.arithmetic import ops as spec_ops

# P rows (copies of tokens), E experts, K inputs, N outputs


def grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """The reference: x[ends[e-1] : ends[e]] @ weight[e]ᵀ for every e. Rows behind the last end belong to nobody and
    give zeros; `full` says that there are none."""
    ends = ends_E.tolist()
    pieces = x_PK[: ends[-1]].split([end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)])
    made = [F.linear(piece, weight_NK) for piece, weight_NK in zip(pieces, weight_ENK.unbind(0), strict=True)]
    rest = x_PK[ends[-1] :]
    return torch.cat([*made, rest.new_zeros(len(rest), weight_ENK.shape[1])]) if len(rest) else torch.cat(made)


@dataclass(frozen=True, kw_only=True)
class GroupedCase(Case):
    """Rows spread over experts."""

    rows: int
    """copies of tokens"""
    experts: int
    """weights"""
    outputs: int
    """rows of a weight"""
    inputs: int
    """columns of a weight"""
    even: bool = False
    """every expert has as many rows; otherwise they are drawn at random, and some may have none"""


def _inputs(case: GroupedCase, generator: torch.Generator) -> tuple[Any, ...]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(case.torch_dtype)

    if case.even:
        cuts = torch.arange(1, case.experts, device=generator.device) * case.rows // case.experts
    else:
        cuts = (
            torch.randint(case.rows + 1, (case.experts - 1,), generator=generator, device=generator.device)
            .sort()
            .values
        )
    ends = torch.cat((cuts, cuts.new_tensor([case.rows]))).to(torch.int32)
    return normal(case.rows, case.inputs), normal(case.experts, case.outputs, case.inputs) * case.inputs**-0.5, ends


def _work(case: GroupedCase) -> OpWork:
    sizes: dict[str, Any] = {"groups": case.experts, "dtype": case.dtype}
    shape = (case.rows, case.outputs, case.inputs)
    forward = spec_ops.grouped_matmul("grouped_linear", *shape, **sizes)
    return OpWork.of(forward, *spec_ops.grouped_matmul_backward("grouped_linear", *shape, **sizes), ceiling="gemm")


def _unaligned(case: GroupedCase) -> str | None:
    size = case.torch_dtype.itemsize
    fits = all(n * size % 16 == 0 for n in (case.outputs, case.inputs))
    return None if fits else "rows of the weights must be multiples of 16 bytes"


def _not_triton(case: GroupedCase) -> str | None:
    return refuses_fp64(case) or _unaligned(case)


def _not_pointers(case: GroupedCase) -> str | None:
    """On Hopper it is for what TMA cannot do: there TMA's tiles are those that were timed."""
    chip = accelerator_of(torch.device(case.device))
    if chip is not None and chip.tma and chip.capability[0] == 9 and _not_triton(case) is None:
        return "TMA is used here"
    return refuses_fp64(case)


def _not_torch(case: GroupedCase) -> str | None:
    return _unaligned(case) if case.dtype == "bf16" else "torch's grouped product takes bf16 only"


def _small(case: GroupedCase) -> GroupedCase:
    if case.device == "cpu":
        return replace(case, rows=min(case.rows, 256), outputs=min(case.outputs, 64), inputs=min(case.inputs, 64))
    return replace(case, rows=rows_to_check(case, case.rows, case.inputs + case.outputs))


GROUPED_LINEAR = Op(
    name="grouped_linear",
    reference=grouped_linear,
    versions=(
        Version(
            name="triton",
            run=LazyFunction("armillary.kernels.gemm.grouped_triton", "grouped_linear"),
            refuses=_not_triton,
            needs=("triton", "tma"),
        ),
        Version(
            name="triton, pointers",
            run=LazyFunction("armillary.kernels.gemm.grouped_triton", "grouped_linear_pointers"),
            refuses=_not_pointers,
            needs=("triton",),
        ),
        Version(
            name="torch",
            run=LazyFunction("armillary.kernels.gemm.grouped_torch", "grouped_linear"),
            refuses=_not_torch,
            needs=("grouped_gemm",),
        ),
    ),
    inputs=_inputs,
    work=_work,
    grads=(0, 1),
    cases={
        "8 experts of 4096, hidden 2048": GroupedCase(rows=32768, experts=8, outputs=8192, inputs=2048),
        "its way back": GroupedCase(rows=32768, experts=8, outputs=2048, inputs=4096),
        "mixtral-8x7b": GroupedCase(rows=16384, experts=8, outputs=28672, inputs=4096, even=True),
        "qwen3-30b-a3b": GroupedCase(rows=65536, experts=128, outputs=1536, inputs=2048),
    },
    small=_small,
)
"""for `choose()` and the bench"""
