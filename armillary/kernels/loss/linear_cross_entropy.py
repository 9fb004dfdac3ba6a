"""Cross-entropy of a linear layer's outputs, for vocabularies whose logits are too large to be held at once.

The reference holds all logits; `chunked` (in its own file) holds those of a chunk of tokens and computes loss and
gradients in one pass.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, LazyFunction, Op, OpWork, Version, compiled, in_liger

# M tokens, H hidden, V vocabulary

# of logits that a version may hold (with their gradient they stay below 1.5 GB), and a rival
_MOST_LOGITS_BYTES, _MOST_RIVAL_BYTES = 0.7e9, 2.2e9


def reference(
    x_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Plain torch: logits in the inputs' dtype, the rest in at least fp32. `softcap` 0 is none; `reduction` is 'mean'
    over the targets that are not ignored, or 'sum'."""
    logits = widen(F.linear(x_MH, weight_VH)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    flat, targets = logits.flatten(0, -2), targets_M.flatten()
    return F.cross_entropy(flat, targets, ignore_index=ignore_index, reduction=reduction)


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropyCase(Case):
    """Tokens against a vocabulary."""

    tokens: int
    hidden: int
    vocab: int
    softcap: float = 0.0  # 0 is none
    frozen: bool = False  # the weight gets no gradient


def inputs(case: LinearCrossEntropyCase, generator: torch.Generator) -> tuple[object, ...]:
    x = case.normal(generator, case.tokens, case.hidden)
    weight = case.normal(generator, case.vocab, case.hidden) * case.hidden**-0.5
    targets = torch.randint(0, case.vocab, (case.tokens,), generator=generator, device=generator.device)
    targets[::17] = -100
    return x, weight, targets, -100, "mean", case.softcap, 1.0


def work(case: LinearCrossEntropyCase) -> OpWork:
    """Three GEMMs of 2·M·H·V FLOPs, counted together: our kernel runs all of them in the forward pass."""
    flops = 2.0 * case.tokens * case.hidden * case.vocab
    moved = case.torch_dtype.itemsize * case.hidden * (case.tokens + case.vocab)
    return OpWork(
        flops=flops, bytes=moved, backward_flops=2 * flops, backward_bytes=2 * moved, ceiling="gemm", joint=True
    )


def holds_too_much(case: LinearCrossEntropyCase) -> str | None:
    """Why a version that holds all logits is refused for a case."""
    logits = case.tokens * case.vocab * case.torch_dtype.itemsize
    return f"it would hold {logits / 1e9:.1f} GB of logits" if logits > _MOST_LOGITS_BYTES else None


def _no_rival(case: LinearCrossEntropyCase) -> str | None:
    if holds_too_much(case) is None:
        return "it is among the versions"
    return None if case.tokens * case.vocab * case.torch_dtype.itemsize <= _MOST_RIVAL_BYTES else holds_too_much(case)


def _small(case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
    """The same case where the wide reference can hold its logits several times; smaller sizes on a CPU."""
    if case.device == "cpu":
        return replace(case, tokens=min(case.tokens, 64), hidden=min(case.hidden, 512), vocab=min(case.vocab, 8192))
    return case if 4 * case.tokens * case.vocab < 5e9 else replace(case, tokens=256)


def _case(tokens: int, hidden: int, vocab: int, softcap: float = 0.0) -> LinearCrossEntropyCase:
    return LinearCrossEntropyCase(tokens=tokens, hidden=hidden, vocab=vocab, softcap=softcap)


# with our kernels between the GEMMs on a GPU, with plain torch on a CPU
_CHUNKED = LazyFunction("armillary.kernels.loss.linear_cross_entropy_chunked", "chunked")

LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    reference=reference,
    versions=(
        Version(name="triton", run=_CHUNKED, needs=("triton",)),
        Version(name="chunked", run=_CHUNKED, needs=("no_triton",)),
        replace(compiled(reference), refuses=holds_too_much),
        in_liger("linear_cross_entropy"),
    ),
    rivals=(replace(compiled(reference), name="compile, all logits held", refuses=_no_rival),),
    inputs=inputs,
    work=work,
    grads=(0, 1),
    cases={
        "8k": _case(8192, 4096, 131072),
        "16k": _case(16384, 4096, 131072),
        "32k": _case(32768, 4096, 131072),
        "gemma-2-9b": _case(4096, 3584, 256000, 30.0),
        "gpt2": _case(8192, 768, 50257),
    },
    reference_refuses=holds_too_much,
    small=_small,
)
