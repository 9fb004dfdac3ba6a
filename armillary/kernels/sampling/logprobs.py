"""Log-probabilities of chosen tokens and of the likeliest ones, from raw logits: before penalties and filters."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, Version, in_triton

# B rows, V vocabulary, n likeliest

MOST = 128  # most top logprobs that the kernels can return


def logprobs(logits_BV: Tensor, tokens_B: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(of the tokens [B], of the likeliest [B, n], their ids [B, n]), natural logarithms, at least fp32; of equals the
    lower id comes first. A negative token gives NaN, and so does a row with a NaN."""
    all_BV = widen(logits_BV).log_softmax(dim=-1)
    chosen_B = all_BV.gather(1, tokens_B.clamp_min(0)[:, None])[:, 0]
    ids = widen(logits_BV).sort(dim=-1, descending=True, stable=True).indices[:, :num_top].contiguous()
    return torch.where(tokens_B < 0, torch.nan, chosen_B), all_BV.gather(1, ids), ids


def by_topk(logits_BV: Tensor, tokens_B: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs without sorting all tokens; of equals any may come first."""
    all_BV = widen(logits_BV).log_softmax(dim=-1)
    chosen_B = all_BV.gather(1, tokens_B.clamp_min(0)[:, None])[:, 0]
    values, ids = all_BV.topk(min(num_top, all_BV.shape[1]), dim=-1)
    return torch.where(tokens_B < 0, torch.nan, chosen_B), values, ids


@dataclass(frozen=True, kw_only=True)
class LogprobCase(Case):
    """Rows of a step."""

    batch: int
    vocab: int = 151_936
    num_top: int = 20


def _inputs(case: LogprobCase, generator: torch.Generator) -> tuple[Any, ...]:
    logits = 3 * torch.randn(case.batch, case.vocab, generator=generator, device=generator.device)
    tokens = torch.randint(case.vocab, (case.batch,), generator=generator, device=generator.device)
    return logits.to(case.torch_dtype), tokens, case.num_top


def _work(case: LogprobCase) -> OpWork:
    """Logits are read once."""
    count = case.batch * case.vocab
    return OpWork(flops=4.0 * count, bytes=float(count * case.torch_dtype.itemsize), ceiling="read")


def refuses(case: LogprobCase) -> str | None:
    return f"more than {MOST} likeliest tokens" if case.num_top > MOST else None


LOGPROBS = Op(
    name="logprobs",
    reference=logprobs,
    versions=(
        in_triton("sampling.logprobs_triton", "logprobs", refuses=refuses),
        Version(name="topk", run=by_topk),
    ),
    inputs=_inputs,
    work=_work,
    small=lambda case: replace(case, batch=min(case.batch, 16)),
    cases={
        "256 rows, 20 likeliest": LogprobCase(batch=256),
        "2048 rows of a prompt": LogprobCase(batch=2048, num_top=1),
    },
)
