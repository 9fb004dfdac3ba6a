"""The levers of the exercise on serving: settings of [serve] before and after, the work that is timed, what arithmetic
allows at most, and what others promise of it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from serving_model import Models, order

from armillary.engine.bench.measure import serve_all
from armillary.engine.llm import LLM
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.spec.tables.serve import Serve
from armillary.units import count_text

TOGETHER, TOKENS = 8, 16
PREFIX, OWN = 384, 16
LENGTHS = (2, 4, 6, 24)
"""tokens of the answers whose lengths differ: one of four is long"""
VLLM = "24 × Hugging Face Transformers, at most ([vLLM](https://blog.vllm.ai/2023/06/20/vllm.html), 2023)"
ANYSCALE = "8 × naive batching ([Anyscale](https://www.anyscale.com/blog/continuous-batching-llm-inference), 2023)"
SGLANG = "6.4 × other systems' throughput, at most ([SGLang](https://arxiv.org/abs/2312.07104), 2023)"
GPT_FAST = "1.5 × bf16 on an A100 ([gpt-fast](https://pytorch.org/blog/accelerating-generative-ai-2/), 2023)"
SAXENA = "2 to 4 × where output repeats input ([Saxena](https://github.com/apoorvumang/prompt-lookup-decoding), 2023)"
LEVIATHAN = "2 to 3 × on T5-XXL ([Leviathan et al.](https://arxiv.org/abs/2211.17192), 2022)"
BF16 = "bf16 weights"
QUICK = {"prefix cache", "int8 weights", "prompt lookup"}
NUMBERS = count()
Rate = Callable[[LLM], float]


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A setting of [serve] before and after, the work, and what others promise of it; `rate` is higher where faster."""

    name: str
    work: str
    unit: str
    rate: Rate
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any]
    advertised: str
    at_most: Callable[[LLM], float | None]
    """what arithmetic allows, from what the engine counted"""


# --- the work


def prompts(llm: LLM, number: int, seed: int = 3) -> list[list[int]]:
    """Two orders and the beginning of a third, as tokens."""
    draw = random.Random(seed)
    assert llm.tokenizer is not None
    return [llm.tokenizer.encode(order(draw) + order(draw) + order(draw)[:12]) for _ in range(number)]


def requests(asked: Sequence[list[int]], lengths: Sequence[int]) -> list[Request]:
    """Greedy, each of exactly its length."""
    return [
        Request(
            id=f"{next(NUMBERS)}",
            prompt=prompt,
            params=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
        )
        for prompt, length in zip(asked, lengths, strict=True)
    ]


def tokens_per_s(llm: LLM, asked: list[Request]) -> float:
    """By the clock of this process, which stands still while other programs run; the engine has one thread."""
    begin = time.process_time()
    served = serve_all(llm.engine, asked)
    return served.tokens_out / (time.process_time() - begin)


def alone(llm: LLM) -> float:
    """One request at a time."""
    return statistics.mean(tokens_per_s(llm, requests([prompt], [TOKENS])) for prompt in prompts(llm, 2))


def together(llm: LLM) -> float:
    """Many requests at once."""
    return tokens_per_s(llm, requests(prompts(llm, TOGETHER), [TOKENS] * TOGETHER))


def ragged(llm: LLM) -> float:
    """The same where answers differ in length."""
    return tokens_per_s(llm, requests(prompts(llm, TOGETHER), LENGTHS * (TOGETHER // len(LENGTHS))))


def shared_prefix(llm: LLM) -> float:
    """First tokens: requests one after the other that begin alike; the first one's prefix is new and does not count."""
    draw, vocab = random.Random(5), 300
    prefix = [draw.randrange(vocab) for _ in range(PREFIX)]
    asked = [prefix + [draw.randrange(vocab) for _ in range(OWN)] for _ in range(3)]
    return statistics.mean([tokens_per_s(llm, requests([prompt], [1])) for prompt in asked][1:])


# --- what arithmetic allows


def tokens_per_step(llm: LLM) -> float | None:
    """Expected tokens of a step in which all drafts are tried and cost nothing: 1 + a + a² + … None where the engine
    drafted nothing, because by the times it measures no draft pays."""
    accepted = llm.engine.state()["acceptance_fraction"]
    return float(sum(accepted**j for j in range(Serve().max_draft + 1))) if accepted else None


def levers(models: Models) -> list[Lever]:
    mean, drafts = statistics.mean(LENGTHS), f", {count_text(models.draft_parameters)} drafts"
    return [
        Lever(
            name="continuous batching",
            work=f"{TOGETHER} requests of {TOKENS} tokens, before: one at a time",
            unit="tokens/s",
            rate=together,
            before={"batching": "none"},
            after={},
            advertised=VLLM,
            at_most=lambda llm: float(TOGETHER),
        ),
        Lever(
            name="continuous batching",
            work=f"answers of {LENGTHS[0]} to {LENGTHS[-1]} tokens, before: static batches of 4",
            unit="tokens/s",
            rate=ragged,
            before={"batching": "static", "max_running": 4},
            after={"max_running": 4},
            advertised=ANYSCALE,
            at_most=lambda llm: LENGTHS[-1] / mean,
        ),
        Lever(
            name="prefix cache",
            work=f"prompts of {PREFIX} shared and {OWN} own tokens",
            unit="first tokens/s",
            rate=shared_prefix,
            before={"prefix_cache": False},
            after={"prefix_cache": True},
            advertised=SGLANG,
            at_most=lambda llm: (PREFIX + OWN) / OWN,
        ),
        *_alone_and_together("int8 weights", {"weights": "int8"}, GPT_FAST, lambda llm: models.int8_ratio),
        _alone(BF16, {"dtype": "bf16"}, "–", lambda llm: 2.0),
        _alone("prompt lookup", {"speculate": "ngram"}, SAXENA, tokens_per_step),
        *_alone_and_together("draft model", {"draft": str(models.draft)}, LEVIATHAN, tokens_per_step, drafts),
    ]


def _alone_and_together(
    name: str, after: dict[str, Any], advertised: str, at_most: Callable[[LLM], float | None], note: str = ""
) -> list[Lever]:
    """A lever that acts on one request as on many."""
    one = _alone(name, after, advertised, at_most, note)
    return [one, replace(one, work=f"{TOGETHER} requests together", rate=together)]


def _alone(
    name: str, after: dict[str, Any], advertised: str, at_most: Callable[[LLM], float | None], note: str = ""
) -> Lever:
    work = f"one request at a time{note}"
    return Lever(name=name, work=work, unit="tokens/s", rate=alone, after=after, advertised=advertised, at_most=at_most)
