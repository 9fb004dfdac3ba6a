"""Fused causal attention, forward and backward: far from the rate of plain products, so a ceiling of its own.

Pairs that the mask leaves out are not counted. It is timed without rests, as training runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from armillary.kernels.timing import Call
from armillary.profiling.settings import Settings
from armillary.spec.attention_ops import AttentionShape, attention, attention_backward, self_spans

_KEYS, _HEADS, _HEAD_DIM, _ROWS = 4096, 16, 128, 8
_SECONDS = 0.5
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cases(settings: Settings) -> list[dict[str, Any]]:
    """Both passes, on a GPU."""
    if not settings.on_cuda:
        return []
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    shape = {"keys": _KEYS, "heads": _HEADS, "head_dim": _HEAD_DIM, "dtype": half}
    return [shape | {"backward": backward} for backward in (False, True)]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """FLOP/s of one pass, by torch's first backend that has it."""
    for case in chosen:
        timing = settings.time(_call(case, settings.device), budget_s=settings.budget_s if settings.quick else _SECONDS)
        flops = counted_flops(case["keys"], case["heads"], case["head_dim"], backward=case["backward"])
        yield "attention", settings.point(case, timing, {"flops": flops / timing.seconds})


def counted_flops(keys: int, heads: int, head_dim: int, *, backward: bool) -> float:
    """As spec counts them."""
    shape = AttentionShape(heads=heads, kv_heads=heads, qk_dim=head_dim, v_dim=head_dim)
    spans = self_spans([keys] * _ROWS)
    op = (attention_backward if backward else attention)("attention", shape, spans, dtype="bf16", flash=True)
    return float(op.flops)


def _call(case: dict[str, Any], device: torch.device) -> Call:
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float16
    size = (_ROWS, case["heads"], case["keys"], case["head_dim"])
    q, k, v, dy = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    if not case["backward"]:
        return lambda: _attend(q, k, v)
    operands = [x.requires_grad_() for x in (q, k, v)]
    made = _attend(*operands)
    return lambda: torch.autograd.grad(made, operands, dy, retain_graph=True)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
