"""Linear layers of many experts in one grouped GEMM: rows sorted by expert, each group times its expert's weight.

`ends[e]` is where the rows of expert e end; they begin where those of e - 1 end. The reference waits for the device to
know how many rows each expert has; the kernels read that on the device, so nothing waits.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, Version, in_triton, refuses_fp64, rows_to_check
from armillary.machine.accelerator import accelerator_of
from armillary.spec.arithmetic import ops as spec_ops

# P rows (copies of tokens), E experts, K inputs, N outputs


def grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """The reference: x[ends[e-1] : ends[e]] @ weight[e]ᵀ for every e. Rows after the last end belong to no expert and
    give zeros; `full` says that there are none."""
    ends = ends_E.tolist()
    groups = x_PK[: ends[-1]].split([end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)])
    outputs = [F.linear(group, weight_NK) for group, weight_NK in zip(groups, weight_ENK.unbind(0), strict=True)]
    rest = x_PK[ends[-1] :]
    return torch.cat([*outputs, rest.new_zeros(len(rest), weight_ENK.shape[1])]) if len(rest) else torch.cat(outputs)


def torch_grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """By torch's own kernel (CUTLASS on Hopper). Rows of no expert are masked, because torch leaves them
    uninitialised."""
    if full:
        return _TorchGrouped.apply(x_PK, weight_ENK, ends_E)
    owned_P1 = torch.arange(len(x_PK), device=x_PK.device)[:, None] < ends_E[-1]
    return _TorchGrouped.apply(x_PK.where(owned_P1, 0.0), weight_ENK, ends_E).where(owned_P1, 0.0)


class _TorchGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_PK, weight_ENK, ends_E)
        return torch._grouped_mm(x_PK, weight_ENK.transpose(-2, -1), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, dy_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_PK, weight_ENK, ends_E = ctx.saved_tensors
        dy_PN, (needs_x, needs_weight, _) = dy_PN.contiguous(), ctx.needs_input_grad
        dx = torch._grouped_mm(dy_PN, weight_ENK, offs=ends_E) if needs_x else None
        dweight = torch._grouped_mm(dy_PN.t(), x_PK, offs=ends_E) if needs_weight else None
        return dx, dweight, None


@dataclass(frozen=True, kw_only=True)
class GroupedCase(Case):
    """Rows distributed over experts."""

    rows: int  # copies of tokens
    experts: int
    outputs: int  # rows of a weight
    inputs: int
    even: bool = False  # every expert has as many rows; otherwise their numbers are random, and some may be 0


def _inputs(case: GroupedCase, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    if case.even:
        inner = torch.arange(1, case.experts, device=device) * case.rows // case.experts
    else:
        inner = torch.randint(case.rows + 1, (case.experts - 1,), generator=generator, device=device).sort().values
    ends = torch.cat((inner, inner.new_tensor([case.rows]))).to(torch.int32)
    x = case.normal(generator, case.rows, case.inputs)
    return x, case.normal(generator, case.experts, case.outputs, case.inputs) * case.inputs**-0.5, ends


def _work(case: GroupedCase) -> OpWork:
    sizes: dict[str, Any] = {"groups": case.experts, "dtype": case.dtype}
    shape = (case.rows, case.outputs, case.inputs)
    forward = spec_ops.grouped_matmul("grouped_linear", *shape, **sizes)
    return OpWork.of(forward, *spec_ops.grouped_matmul_backward("grouped_linear", *shape, **sizes), ceiling="gemm")


def _unaligned(case: GroupedCase) -> str | None:
    aligned = all(n * case.torch_dtype.itemsize % 16 == 0 for n in (case.outputs, case.inputs))
    return None if aligned else "rows of the weights must be multiples of 16 bytes"


def _not_triton(case: GroupedCase) -> str | None:
    return refuses_fp64(case) or _unaligned(case)


def _not_pointers(case: GroupedCase) -> str | None:
    """On Hopper it is for what TMA cannot do: there TMA's tiles are those that were timed."""
    chip = accelerator_of(torch.device(case.device))
    if chip is not None and chip.tma and chip.capability[0] == 9 and _not_triton(case) is None:
        return "TMA is used here"
    return refuses_fp64(case)


def _not_torch(case: GroupedCase) -> str | None:
    return _unaligned(case) if case.dtype == "bf16" else "torch's grouped GEMM takes bf16 only"


def _small(case: GroupedCase) -> GroupedCase:
    if case.device == "cpu":
        return replace(case, rows=min(case.rows, 256), outputs=min(case.outputs, 64), inputs=min(case.inputs, 64))
    return replace(case, rows=rows_to_check(case, case.rows, case.inputs + case.outputs))


GROUPED_LINEAR = Op(
    name="grouped_linear",
    reference=grouped_linear,
    versions=(
        in_triton("gemm.grouped_triton", "grouped_linear", refuses=_not_triton, needs=("tma",)),
        in_triton("gemm.grouped_triton", "grouped_linear_pointers", name="triton, pointers", refuses=_not_pointers),
        Version(name="torch", run=torch_grouped_linear, refuses=_not_torch, needs=("grouped_gemm",)),
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
