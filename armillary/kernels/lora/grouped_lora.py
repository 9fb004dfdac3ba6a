"""Low-rank adapters of many rows in one call: y[t] += B[s]·(A[s]·x[t]), where s is the adapter of row t.

Rows are sorted by adapter, as copies of tokens are by expert in a grouped GEMM (Punica, Chen et al. 2023, arXiv
2310.18547; S-LoRA, Sheng et al. 2023, arXiv 2311.03285). A projection fused of P matrices (queries, keys, values) has P
matrices A above each other, and column n of y belongs to A number part_N[n].
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, Version, in_triton, refuses_fp64, rows_to_check

# T rows, K inputs, N outputs, S slots (one adapter each), r rank, P matrices A of a projection, R = P·r


class LoraRows(NamedTuple):
    """The adapters of a step's rows."""

    slots_T: Tensor  # int64; S where a row has none
    order_T: Tensor  # int64: rows sorted by slot
    ends_S: Tensor  # int32: where the rows of each slot end in this order


def lora_rows(slots_T: Tensor, num_slots: int) -> LoraRows:
    """Of rows by their slots, -1 for none; nothing here waits for the device."""
    slots_T = slots_T.long().where(slots_T >= 0, num_slots)
    sorted_T, order_T = slots_T.sort(stable=True)
    each = torch.arange(num_slots, device=slots_T.device)
    return LoraRows(slots_T, order_T, torch.searchsorted(sorted_T, each, right=True, out_int32=True))


def add_lora(y_TN: Tensor, x_TK: Tensor, a_SRK: Tensor, b_SNr: Tensor, part_N: Tensor, rows: LoraRows) -> Tensor:
    """The reference: row by row, the change of the matrix times x. Writes into y and returns it."""
    for row, slot in enumerate(rows.slots_T.tolist()):
        if slot < len(a_SRK):
            b_NR = expanded(b_SNr[slot], part_N, a_SRK.shape[1])
            change_NK = b_NR.to(_wide(y_TN)) @ a_SRK[slot].to(_wide(y_TN))
            y_TN[row] += (change_NK @ x_TK[row].to(change_NK.dtype)).to(y_TN.dtype)
    return y_TN


def add_lora_by_adapter(
    y_TN: Tensor, x_TK: Tensor, a_SRK: Tensor, b_SNr: Tensor, part_N: Tensor, rows: LoraRows
) -> Tensor:
    """Two GEMMs per adapter that has rows: for a CPU, which knows the groups without waiting."""
    begin = 0
    for slot, end in enumerate(rows.ends_S.tolist()):
        if end > begin:
            own = rows.order_T[begin:end]
            inner = x_TK[own] @ a_SRK[slot].t()
            b_NR = expanded(b_SNr[slot], part_N, a_SRK.shape[1])
            y_TN[own] = torch.addmm(y_TN[own], inner, b_NR.t())
        begin = end
    return y_TN


def expanded(b_Nr: Tensor, part_N: Tensor, width: int) -> Tensor:
    """B as [N, P·r]: each row in the columns of its own A, zero in the others."""
    parts = width // b_Nr.shape[1]
    if parts == 1:
        return b_Nr
    own_NP = part_N[:, None] == torch.arange(parts, device=part_N.device)
    return (b_Nr[:, None] * own_NP[:, :, None]).flatten(1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class LoraCase(Case):
    """Rows distributed over adapters at random; some adapters have none, and some rows have no adapter."""

    rows: int
    slots: int
    rank: int
    outputs: int
    inputs: int
    parts: int = 1


def _inputs(case: LoraCase, generator: torch.Generator) -> tuple[Any, ...]:
    device, wide = generator.device, case.parts * case.rank
    slots = torch.randint(-1, case.slots, (case.rows,), generator=generator, device=device)
    part_N = torch.arange(case.outputs, device=device) * case.parts // case.outputs
    return (
        case.normal(generator, case.rows, case.outputs),
        case.normal(generator, case.rows, case.inputs),
        case.normal(generator, case.slots, wide, case.inputs) * case.inputs**-0.5,
        case.normal(generator, case.slots, case.outputs, case.rank) * case.rank**-0.5,
        part_N.to(torch.int32),
        lora_rows(slots, case.slots),
    )


def _work(case: LoraCase) -> OpWork:
    size, wide = case.torch_dtype.itemsize, case.parts * case.rank
    used = min(case.slots, case.rows)
    weights = used * (wide * case.inputs + case.outputs * case.rank)
    moved = size * (weights + case.rows * (case.inputs + 2 * case.outputs))
    return OpWork(flops=2.0 * case.rows * (wide * case.inputs + case.rank * case.outputs), bytes=float(moved))


def _small(case: LoraCase) -> LoraCase:
    if case.device == "cpu":
        few = replace(case, rows=min(case.rows, 32), slots=min(case.slots, 6))
        return replace(few, outputs=min(case.outputs, 96), inputs=min(case.inputs, 64))
    return replace(case, rows=rows_to_check(case, case.rows, case.inputs + case.outputs))


LORA = Op(
    name="add_lora",
    reference=add_lora,
    versions=(
        in_triton("lora.grouped_lora_triton", "add_lora", refuses=refuses_fp64),
        Version(name="by adapter", run=add_lora_by_adapter),
    ),
    inputs=_inputs,
    work=_work,
    writes=(0,),
    cases={
        "llama-3.1-8b QKV, 64 adapters": LoraCase(rows=256, slots=64, rank=16, outputs=6144, inputs=4096, parts=3),
        "llama-3.1-8b out, 64 adapters": LoraCase(rows=256, slots=64, rank=16, outputs=4096, inputs=4096),
        "llama-3.1-8b gate and up": LoraCase(rows=256, slots=64, rank=16, outputs=28672, inputs=4096, parts=2),
        "llama-3.1-8b down": LoraCase(rows=256, slots=64, rank=16, outputs=4096, inputs=14336),
    },
    small=_small,
)
