"""Vectors of prompts instead of tokens: which hidden states of a step they are made of, and where they are kept.

A prompt may be computed in several chunks. The last and the first token are in one of them; a mean is a sum over all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from armillary.engine.request.pooling import Pooling
from armillary.engine.runner.step_input import PooledTokens, Step
from armillary.engine.scheduler.decision import Decision, PrefillChunk

if TYPE_CHECKING:
    from armillary.engine.runner.forward import Forward

# T tokens, B sequences, H hidden, V vocabulary


def pooled_chunks(decision: Decision) -> Iterator[tuple[PrefillChunk, PooledTokens]]:
    """Chunks with tokens that a pooled prompt is made of."""
    place = len(decision.decodes)
    for at, chunk in enumerate(decision.chunks, start=len(decision.decodes)):
        pooling = chunk.sequence.request.params.pooling
        if pooling is not None:
            first, size = _span(pooling, chunk)
            if size:
                yield chunk, PooledTokens(first=place + first, size=size, at=at, pooling=pooling)
        place += chunk.size


def _span(pooling: Pooling, chunk: PrefillChunk) -> tuple[int, int]:
    """The first token within a chunk, and the number of tokens."""
    match pooling.mode:
        case "mean":
            return 0, chunk.size
        case "cls":
            return 0, int(chunk.start == 0)
        case _:
            return chunk.size - 1, int(chunk.samples)


def pool(forward: Forward, step: Step, hidden_TH: Tensor, logits_BV: Tensor | None) -> Tensor:
    """Sums of the pooled tokens, or logits, of each pooled chunk, in fp32, one after the other."""
    vectors = [each for each in step.pooled if each.pooling.mode != "logits"]
    tokens = [token for each in vectors for token in range(each.first, each.first + each.size)]
    normed_TH = forward.normed(hidden_TH[torch.tensor(tokens, device=hidden_TH.device)]) if tokens else hidden_TH[:0]
    sums = iter([part.sum(0, dtype=torch.float32) for part in normed_TH.split([each.size for each in vectors])])
    parts = []
    for each in step.pooled:
        if each.pooling.mode == "logits":
            assert logits_BV is not None, "a prompt that ends has logits"
            parts.append(logits_BV[each.at, list(each.pooling.token_ids)].float())
        else:
            parts.append(next(sums))
    return torch.cat(parts)


def store_pooled(decision: Decision, values: list[float]) -> None:
    """Keep what `pool` computed in the sequences. A mean grows chunk by chunk, and begins anew with the first chunk,
    which a preempted sequence computes again."""
    chunks = list(pooled_chunks(decision))
    ids = [len(each.pooling.token_ids) for _, each in chunks]
    hidden = (len(values) - sum(ids)) // max(1, ids.count(0))
    at = 0
    for (chunk, each), num_ids in zip(chunks, ids, strict=True):
        vector, seq = values[at : at + (num_ids or hidden)], chunk.sequence
        at += len(vector)
        if each.pooling.mode == "mean":
            before = seq.pooled if chunk.start else [0.0] * len(vector)
            divisor = seq.num_prompt if chunk.samples else 1
            vector = [(old + new) / divisor for old, new in zip(before, vector, strict=True)]
        seq.pooled = vector
