"""Bandwidth of memory-bound operators: norm, gated activation and loss as eager torch runs them, with gradients.

A copy is the best case. Exponentials, strided access and fresh memory make real operators slower, and only a
measurement can tell by how much; a CPU spends much of a step in them. Bytes are those that operators move
(spec.arithmetic.eager_ops).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from armillary.kernels.core.timing import Call
from armillary.profiling.ceilings.gemm import is_emulated
from armillary.profiling.ceilings.settings import Settings
from armillary.spec import catalogue
from armillary.spec.arithmetic.eager_ops import eager_bytes
from armillary.spec.arithmetic.non_gemm_ops import activation, cross_entropy, norm
from armillary.spec.arithmetic.ops import Op

_TOKENS, _HIDDEN, _FFN, _VOCAB = 1024, 512, 1024, 2048
_LIKE = "armillary-2m"
"""RMSNorm and SwiGLU, as most models have them"""


def cases(settings: Settings) -> list[dict[str, Any]]:
    """In fp32, and in bf16 where a CPU has units for it; a GPU's are fused."""
    dtypes = [] if settings.on_cuda else [dtype for dtype in ("fp32", "bf16") if not is_emulated(dtype, settings)]
    return [{"dtype": dtype, "tokens": _TOKENS} for dtype in dtypes]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in chosen:
        timing = settings.time(_call(case["dtype"], case["tokens"]))
        rate = {"bytes_per_s": moved_bytes(case["dtype"], case["tokens"]) / timing.seconds}
        yield "passes", settings.point(case, timing, rate)


def moved_bytes(dtype: str, tokens: int) -> float:
    """Bytes of forward and backward of the three together."""
    ops: tuple[Op, ...] = (
        norm("norm", tokens, _HIDDEN, dtype=dtype),
        activation("mlp.act", tokens, _FFN, dtype=dtype),
        cross_entropy("loss", tokens, _VOCAB, dtype=dtype),
    )
    traffic = [eager_bytes(catalogue.model(_LIKE).config, op) for op in ops]
    return sum(op_bytes.forward + op_bytes.backward for op_bytes in traffic)


def _call(dtype: str, tokens: int) -> Call:
    """The three, each with a gradient of its own: in a model GEMMs lie between them."""
    half = torch.bfloat16 if dtype == "bf16" else torch.float32
    x, gates, logits = (
        torch.randn(tokens, size, dtype=kind).requires_grad_()
        for size, kind in ((_HIDDEN, torch.float32), (2 * _FFN, half), (_VOCAB, half))
    )
    weight, targets = torch.ones(_HIDDEN, requires_grad=True), torch.randint(0, _VOCAB, (tokens,))
    dy, dz = torch.randn(tokens, _HIDDEN, dtype=half), torch.randn(tokens, _FFN, dtype=half)

    def run() -> None:
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(half)
        gate, up = (part.contiguous() for part in gates.unflatten(-1, (-1, 2)).unbind(-1))
        loss = F.cross_entropy(logits.float(), targets)
        torch.autograd.grad((normed, F.silu(gate) * up, loss), (x, weight, gates, logits), (dy, dz, None))

    return run
