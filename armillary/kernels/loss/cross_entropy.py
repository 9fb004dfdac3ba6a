"""Softmax cross-entropy a row: loss = logsumexp(x) − (1 − ε)·x[target] − ε·mean(x) + z·logsumexp(x)².

ε is label smoothing (Szegedy et al., arXiv 1512.00567), z the weight of the z-loss (Chowdhery et al., arXiv
2204.02311). The loss is in fp32 and by row, 0 where the target is ignored; a target outside the vocabulary gives NaN in
the kernel, where torch would stop the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.compile import compiled
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Late, Op, Version, Work, in_triton, rows_to_check
from armillary.spec.arithmetic import layer_ops

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCase(Case):
    """Logits and their targets."""

    rows: int
    """tokens"""
    vocab: int
    """logits a token"""
    smoothing: float = 0.0
    """ε"""
    z_loss: float = 0.0
    """z"""


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The reference: logits […, V] and targets […] -> losses […] in at least fp32."""
    wide, flat = widen(logits).flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(wide, flat, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing)
    if z_loss:
        loss = loss + z_loss * torch.where(flat == ignore_index, 0.0, torch.logsumexp(wide, -1).square())
    return loss.view(targets.shape)


def _inputs(case: CrossEntropyCase, generator: torch.Generator) -> tuple[Any, ...]:
    """The first target is ignored; no more of them, because rows that are ignored are not read."""
    logits = torch.randn(case.rows, case.vocab, generator=generator, device=case.device, dtype=case.torch_dtype) * 3
    targets = torch.randint(0, case.vocab, (case.rows,), generator=generator, device=case.device)
    targets[:1] = IGNORED
    return logits, targets, IGNORED, case.smoothing, case.z_loss


def _work(case: CrossEntropyCase) -> Work:
    forward = layer_ops.cross_entropy("cross_entropy", case.rows, case.vocab, dtype=case.dtype)
    return Work.of(forward, layer_ops.cross_entropy_backward("cross_entropy", case.rows, case.vocab, dtype=case.dtype))


CROSS_ENTROPY = Op(
    name="cross_entropy",
    reference=cross_entropy,
    versions=(
        in_triton("loss.cross_entropy_triton", "cross_entropy"),
        compiled(cross_entropy),
        Version(
            name="liger", run=Late("armillary.kernels.core.liger", "cross_entropy"), needs=("liger",), overwrites=(0,)
        ),
    ),
    inputs=_inputs,
    work=_work,
    grads=(0,),
    cases={
        "llama-2-7b": CrossEntropyCase(rows=16384, vocab=32000),
        "llama-3-8b": CrossEntropyCase(rows=8192, vocab=128256),
        "qwen3-8b": CrossEntropyCase(rows=8192, vocab=151936, z_loss=1e-4),
        "gemma-3-27b": CrossEntropyCase(rows=4096, vocab=262144),
        "gpt-2 (odd vocabulary)": CrossEntropyCase(rows=16384, vocab=50257),
    },
    small=lambda case: replace(case, rows=rows_to_check(case, case.rows, case.vocab)),
)
