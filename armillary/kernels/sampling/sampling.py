"""Sampling of the next token of every row: penalties, temperature, min-p, top-k, top-p, and a draw by the row's seed.

Everything is a tensor on the device, one value per row, so rows of any kind share a batch and nothing waits for the
CPU. Weights are integers computed by a fixed sequence of exactly rounded operations, and sums of integers do not depend
on their order: a request gets the same tokens in any batch, on a CPU, on a GPU, fast or slow.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, Version, in_triton, takes_all

# B rows, V vocabulary, S rows of the penalty tables, W words of 32 tokens

LOG2E = 1.4426950408889634
# (2^f - 1) / f on [-1/2, 1/2] as a polynomial, accurate to 1e-7; fitted at Chebyshev nodes
EXP2 = (
    0.6931471824645996,
    0.24022650718688965,
    0.055503569543361664,
    0.009618056938052177,
    0.0013390866806730628,
    0.00015461447765119374,
)
_LOW_WORD = 0xFFFFFFFF
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
ONE = 40  # the likeliest token weighs 2^ONE; a weight below 1 cannot be drawn


@dataclass(frozen=True, kw_only=True, eq=False)
class Draws:
    """Sampling parameters per row, applied in this order: temperature, min-p, top-k, top-p."""

    temperature_B: Tensor  # 0: the largest logit, the first of equals
    min_p_B: Tensor  # keep tokens at least this likely relative to the likeliest; 0: all
    top_k_B: Tensor  # keep the k likeliest, and those as likely as the last of them; 0: all
    top_p_B: Tensor  # the likeliest tokens that make up this share of the rest, and those as likely as the last; 1: all
    seeds_B: Tensor  # int64, the request's own
    steps_B: Tensor  # int64, position of the token that is drawn: the counter of the random number generator


@dataclass(frozen=True, kw_only=True, eq=False)
class Penalties:
    """Penalties for tokens that occurred before; applied before everything else but the allowed mask."""

    repetition_B: Tensor  # divides positive logits and multiplies others, for tokens of prompt or output
    presence_B: Tensor  # subtracted from the logits of tokens of the output
    frequency_B: Tensor  # subtracted per occurrence in the output
    counts_SV: Tensor  # how often a token occurs in the output, int32
    prompt_SV: Tensor  # whether a token is in the prompt, bool
    rows_B: Tensor | None = None  # row of both tables that a row of the batch uses; its own number unless given


def sample(
    logits_BV: Tensor, draws: Draws, penalties: Penalties | None = None, allowed_BW: Tensor | None = None
) -> Tensor:
    """Token ids [B], int64; -1 for a row with a NaN or without a possible token. Tokens whose bit in `allowed_BW`
    (int32, token v is bit v % 32 of word v // 32) is 0 are excluded. The order of all steps is vLLM's."""
    scores = score(logits_BV, penalties, allowed_BW)
    top_B, best_B = scores.max(dim=1)
    weights = weigh(scores, top_B, draws.temperature_B)
    masses = filtered(weights, draws.top_k_B, draws.top_p_B, draws.min_p_B)
    drawn_B = drawn(masses, philox(draws.seeds_B, draws.steps_B)[0] >> 1)
    tokens = torch.where(draws.temperature_B > 0, drawn_B, best_B)
    broken = scores.isnan().any(dim=1) | (top_B == -torch.inf)
    return torch.where(broken, -1, tokens)


def score(logits_BV: Tensor, penalties: Penalties | None, allowed_BW: Tensor | None) -> Tensor:
    """Logits after penalties; -inf where a token is excluded."""
    x = logits_BV.float()
    if penalties is not None:
        rows = slice(0, x.shape[0]) if penalties.rows_B is None else penalties.rows_B
        counts, prompt = penalties.counts_SV[rows], penalties.prompt_SV[rows]
        factor = torch.where(prompt | (counts > 0), penalties.repetition_B.float()[:, None], 1.0)
        x = torch.where(x > 0, x / factor, x * factor)
        x = x - penalties.frequency_B.float()[:, None] * counts
        x = x - torch.where(counts > 0, penalties.presence_B.float()[:, None], 0.0)
    if allowed_BW is not None:
        token = torch.arange(x.shape[1], device=x.device)
        bits = (allowed_BW[:, token // 32] >> (token % 32)) & 1
        x = torch.where(bits == 1, x, -torch.inf)
    return x


def weigh(scores: Tensor, top_B: Tensor, temperature_B: Tensor) -> Tensor:
    """2^((score - top) · log2 e / temperature) in fp32, at most 1."""
    factor_B = LOG2E / torch.where(temperature_B > 0, temperature_B.float(), 1.0)
    power = ((scores - top_B[:, None]) * factor_B[:, None]).clamp_min(-ONE - 2.0)
    power = torch.where(scores == top_B[:, None], 0.0, power)
    exponent = torch.floor(power + 0.5)
    part = power - exponent
    value = torch.full_like(part, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        value = value * part + coefficient
    value = value * part + 1.0
    return value * ((exponent.nan_to_num().int() + 127) << 23).view(torch.float32)


def _integer(weights: Tensor) -> Tensor:
    return (weights * 2.0**ONE).long()


def likely(weights: Tensor, min_p_B: Tensor) -> Tensor:
    """Integer weights, 0 below min-p."""
    masses = _integer(weights.nan_to_num())
    return torch.where(masses >= _integer(min_p_B.float().clamp(max=1.0))[:, None], masses, 0)


def filtered(
    weights: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, total_B: Tensor | None = None
) -> Tensor:
    """Integer weights, 0 for tokens that the filters drop; `total_B` where top-p refers to more than these weights."""
    masses = likely(weights, min_p_B)
    down, order = weights.nan_to_num().sort(dim=1, descending=True)
    place = torch.where(top_k_B > 0, top_k_B, weights.shape[1]).long().clamp_max(weights.shape[1]) - 1
    masses = torch.where(weights >= down.gather(1, place[:, None]), masses, 0)
    sums = masses.gather(1, order).cumsum(dim=1)
    total_B = sums[:, -1] if total_B is None else total_B
    wanted = share(total_B, (top_p_B.float().clamp(0, 1) * 2.0**30).long(), 30).clamp_min(1)
    last = (sums < wanted[:, None]).sum(dim=1).clamp_max(weights.shape[1] - 1)
    last = torch.where(top_p_B < 1, last, weights.shape[1] - 1)
    return torch.where(weights >= down.gather(1, last[:, None]), masses, 0)


def share(total: Tensor, fraction: Tensor, bits: int) -> Tensor:
    """⌊total · fraction / 2^bits⌋ for total < 2^60 and fraction ≤ 2^bits, bits ≤ 31, without overflow."""
    high, low = total >> 32, total & 0xFFFFFFFF
    return ((high * fraction) << (32 - bits)) + ((low * fraction) >> bits)


def drawn(masses: Tensor, random_B: Tensor) -> Tensor:
    """The first token at which the running sum passes a random share (31 bits) of the total."""
    sums = masses.cumsum(dim=1)
    target = share(sums[:, -1], random_B, 31)
    return (sums <= target[:, None]).sum(dim=1)


def philox(seed: Tensor, counters: Tensor) -> list[Tensor]:
    """Counter-based random numbers, Philox 4×32 with ten rounds (Salmon et al., SC 2011), the twin of the kernels'
    generator: the four 32-bit words of each (seed, counter), all int64; one seed for all, or one per counter."""
    state = [counters & _LOW_WORD, (counters >> 32) & _LOW_WORD, torch.zeros_like(counters), torch.zeros_like(counters)]
    keys = [seed & _LOW_WORD, (seed >> 32) & _LOW_WORD]
    for _ in range(10):
        # the product of two 32-bit words wraps around in int64, but all 64 bits are there
        first, second = state[0] * _PHILOX_FACTORS[0], state[2] * _PHILOX_FACTORS[1]
        state = [
            ((second >> 32) & _LOW_WORD) ^ state[1] ^ keys[0],
            second & _LOW_WORD,
            ((first >> 32) & _LOW_WORD) ^ state[3] ^ keys[1],
            first & _LOW_WORD,
        ]
        keys = [(key + step) & _LOW_WORD for key, step in zip(keys, _PHILOX_KEYS, strict=True)]
    return state


# --- for CPUs

_REACH = (ONE + 4) / LOG2E  # natural units below the largest score, at temperature 1, beyond which every weight is 0
_CANDIDATES = 2048


def sample_rows(
    logits_BV: Tensor, draws: Draws, penalties: Penalties | None = None, allowed_BW: Tensor | None = None
) -> Tensor:
    """`sample` one row at a time, with values read on the CPU: tokens with zero weight are left out first, and only the
    likeliest are sorted. A token whose weight would be below 1 can neither be drawn nor change a sum, so the rest gives
    the same token."""
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
            masses = _filtered_row(weights, draws.top_k_B[row], draws.top_p_B[row], draws.min_p_B[row])
            tokens[b] = left[drawn(masses, random_B[row])[0]]
    return tokens


def _filtered_row(weights_1V: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
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


# --- the op


@dataclass(frozen=True, kw_only=True)
class SampleCase(Case):
    """A batch of equal rows."""

    batch: int
    vocab: int = 151_936
    temperature: float = 0.7  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    penalties: bool = False  # repetition, presence and frequency


def _inputs(case: SampleCase, generator: torch.Generator) -> tuple[Any, ...]:
    device, batch = generator.device, case.batch
    each = partial(torch.full, (batch,), device=device, dtype=torch.float32)
    logits = 3 * torch.randn(batch, case.vocab, generator=generator, device=device)
    draws = Draws(
        temperature_B=each(case.temperature),
        min_p_B=each(case.min_p),
        top_k_B=each(case.top_k, dtype=torch.int32),
        top_p_B=each(case.top_p),
        seeds_B=torch.randint(1 << 60, (batch,), generator=generator, device=device),
        steps_B=torch.arange(batch, device=device),
    )
    if not case.penalties:
        return logits.to(case.torch_dtype), draws
    counts = torch.randint(8, logits.shape, generator=generator, device=device, dtype=torch.int32)
    penalties = Penalties(
        repetition_B=each(1.1),
        presence_B=each(0.2),
        frequency_B=each(0.3),
        counts_SV=counts.sub_(5).clamp_min_(0),
        prompt_SV=torch.rand(logits.shape, generator=generator, device=device) < 0.05,
    )
    return logits.to(case.torch_dtype), draws, penalties


def _work(case: SampleCase) -> OpWork:
    """Logits and penalty tables are read once."""
    a_token = case.torch_dtype.itemsize + (5 if case.penalties else 0)
    return OpWork(flops=20.0 * case.batch * case.vocab, bytes=float(case.batch * case.vocab * a_token), ceiling="read")


SAMPLE = Op(
    name="sample",
    reference=sample,
    versions=(
        in_triton("sampling.sampling_triton", "sample", refuses=takes_all),
        Version(name="rows", run=sample_rows),
    ),
    inputs=_inputs,
    work=_work,
    small=lambda case: replace(case, batch=min(case.batch, 32)),
    cases={
        "greedy, 256 rows": SampleCase(batch=256, temperature=0.0),
        "temperature, 256 rows": SampleCase(batch=256),
        "top-k 50, top-p 0.95, 256 rows": SampleCase(batch=256, top_k=50, top_p=0.95),
        "top-p 0.9, 1 row": SampleCase(batch=1, top_p=0.9),
        "penalties and top-k, 64 rows, 262k tokens": SampleCase(batch=64, vocab=262_144, top_k=50, penalties=True),
    },
)
