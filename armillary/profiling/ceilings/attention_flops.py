"""Fused causal attention, forward and backward: far from the rate of plain GEMMs, so it has a ceiling of its own.

Pairs that the mask leaves out are not counted. It is timed without pauses, as training runs it. A CPU is measured
at several lengths: short sequences reach a tenth of what long ones do, which no other ceiling shows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from armillary.kernels.core.dtype import DTYPES
from armillary.kernels.core.timing import Call
from armillary.profiling.ceilings.gemm import is_emulated
from armillary.profiling.ceilings.settings import Settings
from armillary.spec.arithmetic.attention_ops import AttentionShape, attention, attention_backward, self_spans
from armillary.spec.precision import SIXTEEN_BIT, WIDE

_KEYS, _HEADS, _HEAD_DIM, _ROWS = 4096, 16, 128, 8
_ON_CPU = ((128, 8, 64), (512, 2, 64), (2048, 1, 64), (128, 8, 32), (128, 8, 128))
"""(keys, rows, head dim): one or two thousand tokens"""
_CPU_HEADS = 4
_SECONDS = 0.5
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cases(settings: Settings) -> list[dict[str, Any]]:
    """Forward and backward, at one length on a GPU; on a CPU in every dtype that it has units for."""
    if settings.on_cuda:
        half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        shapes = [{"keys": _KEYS, "heads": _HEADS, "head_dim": _HEAD_DIM, "dtype": half}]
    else:
        native = [dtype for dtype in (WIDE, *SIXTEEN_BIT) if not is_emulated(dtype, settings)]
        shapes = [
            {"keys": keys, "heads": _CPU_HEADS, "head_dim": dim, "dtype": dtype, "rows": rows}
            for keys, rows, dim in _ON_CPU
            for dtype in native
        ]
    return [shape | {"backward": backward} for shape in shapes for backward in (False, True)]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """FLOP/s of one pass, by torch's first backend that has it."""
    for case in chosen:
        timing = settings.time(_call(case, settings.device), budget_s=settings.budget_s if settings.quick else _SECONDS)
        flops = counted_flops(
            case["keys"], case["heads"], case["head_dim"], backward=case["backward"], rows=case.get("rows")
        )
        yield "attention", settings.point(case, timing, {"flops": flops / timing.seconds})


def counted_flops(keys: int, heads: int, head_dim: int, *, backward: bool, rows: int | None = None) -> float:
    """As spec counts them."""
    shape = AttentionShape(heads=heads, kv_heads=heads, qk_dim=head_dim, v_dim=head_dim)
    spans = self_spans([keys] * (rows or _ROWS))
    op = (attention_backward if backward else attention)("attention", shape, spans, dtype="bf16", flash=True)
    return float(op.flops)


def _call(case: dict[str, Any], device: torch.device) -> Call:
    dtype = DTYPES[case["dtype"]]
    size = (case.get("rows", _ROWS), case["heads"], case["keys"], case["head_dim"])
    q, k, v, dy = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    if not case["backward"]:
        return lambda: _attend(q, k, v)
    operands = [x.requires_grad_() for x in (q, k, v)]
    output = _attend(*operands)
    return lambda: torch.autograd.grad(output, operands, dy, retain_graph=True)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
