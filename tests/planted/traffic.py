"""What is asked of a planted engine: prompts that share beginnings or not, short and long, at once or by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from tests.planted.serve_small import VOCAB, Arrival


def asked(name: str, prompt: Sequence[int], tokens_out: int) -> Request:
    """One request, answered to its full length."""
    return Request(id=name, prompt=list(prompt), params=SamplingParams(max_tokens=tokens_out, ignore_eos=True, seed=0))


def mixed(
    count: int, *, tokens_in: tuple[int, int], tokens_out: tuple[int, int], seed: int, name: str = "r"
) -> list[Request]:
    """Prompts and answers of any length within the bounds."""
    dice = Random(seed)
    return [asked(f"{name}{i}", words(dice, dice.randint(*tokens_in)), dice.randint(*tokens_out)) for i in range(count)]


def sharing(
    count: int, *, prefixes: int, prefix_tokens: int, tokens_in: int, tokens_out: int, seed: int
) -> list[Request]:
    """Prompts that begin with one of a few texts, in turn, and end with words of their own."""
    dice = Random(seed)
    beginnings = [words(dice, prefix_tokens) for _ in range(prefixes)]
    return [asked(f"r{i}", beginnings[i % prefixes] + words(dice, tokens_in), tokens_out) for i in range(count)]


def words(dice: Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(count)]


def at_once(requests: Sequence[Request]) -> list[Arrival]:
    """All there from the beginning, as a batch job has them."""
    return [Arrival(request=one) for one in requests]


def at_rate(requests: Sequence[Request], per_s: float, seed: int) -> list[Arrival]:
    """Gaps drawn as independent users make them (exponential), `per_s` on average."""
    dice, at, made = Random(seed), 0.0, []
    for one in requests:
        made.append(Arrival(request=one, at_s=at))
        at += dice.expovariate(per_s)
    return made
