"""Sampling one row at a time, for CPUs: tokens with zero weight are left out first, and only the likeliest are sorted.

A token whose weight would be below 1 can neither be drawn nor change a sum, so the rest gives the same token.
"""

import torch
from torch import Tensor

from armillary.kernels.core.philox import philox
from armillary.kernels.sampling.sampling import LOG2E, ONE, Draws, Penalties, drawn, filtered, likely, score, weigh

_REACH = (ONE + 4) / LOG2E  # natural units below the largest score, at temperature 1, beyond which every weight is 0
_CANDIDATES = 2048


def sample(
    logits_BV: Tensor, draws: Draws, penalties: Penalties | None = None, allowed_BW: Tensor | None = None
) -> Tensor:
    """See `armillary.kernels.sampling.sampling.sample`; this version reads values on the CPU."""
    if not logits_BV.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits_BV.device)
    scores = score(logits_BV, penalties, allowed_BW)
    top_B, best_B = scores.max(dim=1)
    tokens, heats = best_B.clone(), draws.temperature_B.tolist()
    random_B = philox(draws.seeds_B, draws.steps_B)[0] >> 1 if any(heat > 0 for heat in heats) else None
    for b, (top, heat) in enumerate(zip(top_B.tolist(), heats, strict=True)):
        if top != top or top == float("-inf"):
            tokens[b] = -1
        elif heat > 0 and random_B is not None:
            row = slice(b, b + 1)
            left = (scores[b] >= top - _REACH * heat).nonzero()[:, 0]
            weights = weigh(scores[b, left][None], top_B[row], draws.temperature_B[row])
            kept = _kept(weights, draws.top_k_B[row], draws.top_p_B[row], draws.min_p_B[row])
            tokens[b] = left[drawn(kept, random_B[row])[0]]
    return tokens


def _kept(weights_1V: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Integer weights of one row after its filters, which consider the likeliest only where those suffice."""
    masses = likely(weights_1V, min_p)
    k, p = int(top_k), float(top_p)
    if k <= 0 and p >= 1:
        return masses
    num_candidates = max(k, _CANDIDATES)
    if num_candidates >= weights_1V.shape[1]:
        return filtered(weights_1V, top_k, top_p, min_p)
    least = weights_1V[0].topk(num_candidates, sorted=False).values.min()
    at = (weights_1V[0] >= least).nonzero()[:, 0]
    total = masses.sum(dim=1) if k <= 0 else None
    if total is not None and int(masses[0, at].sum()) < max(1, p * int(total)) * (1 + 1e-6):
        return filtered(weights_1V, top_k, top_p, min_p)
    return torch.zeros_like(masses).index_copy(1, at, filtered(weights_1V[:, at], top_k, top_p, min_p, total))
