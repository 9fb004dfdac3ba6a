"""Sampling parameters of a request, checked when they are created, before the request is queued."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from armillary.engine.request.constraint import Structure
from armillary.engine.request.pooling import Pooling
from armillary.errors import BadInput
from armillary.model.generation_config import sampling_defaults

MOST_LOGPROBS = 100
MOST_SEQUENCES = 1024
MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""fields of `Sampling` that a model's generation_config.json may set"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How output tokens are sampled, and when the output ends."""

    n: int = 1
    """completions of the prompt, sampled independently"""
    max_tokens: int | None = None
    """most output tokens; none: up to the model's length"""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy"""
    top_k: int = 0
    """keep the k most likely tokens; 0: all"""
    top_p: float = 1.0
    """keep the most likely tokens whose probabilities reach p"""
    min_p: float = 0.0
    """drop tokens below this fraction of the highest probability"""
    repetition_penalty: float = 1.0
    """divides (below zero: multiplies) logits of tokens that occurred; 1: off"""
    presence_penalty: float = 0.0
    """subtracted from the logits of output tokens"""
    frequency_penalty: float = 0.0
    """subtracted once per occurrence of an output token"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """token -> value added to its logit"""
    seed: int | None = None
    """completion i samples with seed + i; none: the engine chooses one"""
    stop: tuple[str, ...] = ()
    """stop strings: they end the output and are not part of it"""
    stop_ids: tuple[int, ...] = ()
    """end tokens besides the model's own"""
    ignore_eos: bool = False
    """the model's own end tokens do not end the output"""
    logprobs: int | None = None
    """log-probabilities of the sampled and of so many most likely tokens"""
    prompt_logprobs: int | None = None
    """the same for the tokens of the prompt"""
    structure: Structure | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """the only tokens allowed; none: all"""
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """forbidden token sequences (`token_limits.bad_tokens_of` makes them from words)"""
    pooling: Pooling | None = None
    """a vector of the prompt is wanted instead of tokens"""

    def __post_init__(self) -> None:
        self._check_kinds()
        self._integer(1, MOST_SEQUENCES, "n")
        self._integer(1, None, "max_tokens")
        self._integer(0, None, "min_tokens", "top_k")
        self._integer(0, MOST_LOGPROBS, "logprobs", "prompt_logprobs")
        self._integer(0, 2**62 - 1, "seed")
        self._between(0, 1e4, "temperature")
        self._between(0, 1, "min_p", "top_p")
        self._between(-2, 2, "presence_penalty", "frequency_penalty")
        self._between(0, 100, "repetition_penalty")
        self._check_together()

    def _check_kinds(self) -> None:
        """A single stop string may be given as a string, several as any list."""
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self._listed("stop"))
        object.__setattr__(self, "stop_ids", self._listed("stop_ids"))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", self._listed("allowed_token_ids"))
        object.__setattr__(self, "bad_tokens", tuple(map(tuple, self._listed("bad_tokens"))))
        if not isinstance(self.logit_bias, Mapping):
            raise BadInput(f"logit_bias={self.logit_bias!r} must map tokens to numbers; correct the request")
        if not isinstance(self.structure, Structure | None):
            raise BadInput(f"structure={self.structure!r} must be a Structure; correct the request")

    def _listed(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            raise BadInput(f"{name}={value!r} must be a list; correct the request")
        return tuple(value)

    def _check_together(self) -> None:
        if not self.top_p > 0:
            raise BadInput("top_p=0 leaves no token; give a value above 0, or temperature=0 for the likeliest")
        if not self.repetition_penalty > 0:
            raise BadInput("repetition_penalty=0 divides by nothing; give 1 for none")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadInput(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower min_tokens")
        if not all(isinstance(text, str) for text in self.stop):
            raise BadInput(f"stop={self.stop!r} must be texts; give tokens as stop_ids")
        if not all(self.stop):
            raise BadInput("a stop text is empty and would end every answer; leave it out")
        if self.pooling is not None and (self.n != 1 or self.max_tokens != 1):
            raise BadInput("a pooled prompt has no completions; give n=1 and max_tokens=1")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadInput("allowed_token_ids is empty and leaves no token; name at least one, or leave it out")
        if not all(self.bad_tokens):
            raise BadInput("bad_tokens has a sequence without a token; leave it out")
        if not all(isinstance(bias, int | float) and isfinite(bias) for bias in self.logit_bias.values()):
            raise BadInput("logit_bias has a value that is no finite number; use -100 to rule a token out")

    def _integer(self, low: int, high: int | None, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low or (high and value > high):
                most = f" and at most {high}" if high else ""
                raise BadInput(f"{name}={value!r} must be a whole number of at least {low}{most}; correct the request")

    def _between(self, low: float, high: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not isfinite(value) or not low <= value <= high:
                raise BadInput(f"{name}={value!r} must be from {low:g} to {high:g}; correct the request")

    @property
    def needs_every_token(self) -> bool:
        """Whether every token of the prompt must be computed, so that none comes from the prefix cache."""
        return self.prompt_logprobs is not None or (self.pooling is not None and self.pooling.needs_every_token)

    @property
    def is_penalised(self) -> bool:
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    def check_vocab(self, vocab: int) -> None:
        """Refuse tokens outside the vocabulary."""
        tokens_by_field = {
            "stop_ids": self.stop_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_tokens": [token for tokens in self.bad_tokens for token in tokens],
            "pooling.token_ids": () if self.pooling is None else self.pooling.token_ids,
        }
        for name, tokens in tokens_by_field.items():
            for token in tokens:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                    raise BadInput(f"{name} has token {token!r} outside the vocabulary of {vocab:,}; leave it out")
        if self.logit_bias and len(self.logit_bias) == vocab and max(self.logit_bias.values()) <= -100:
            raise BadInput("logit_bias rules every token out; leave at least one")


def pooling_params(pooling: Pooling) -> SamplingParams:
    """Parameters of a request that ends with its prefill."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling)


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingParams):
    """Sampling parameters of `armillary.generate` and the verb `generate`: prompt i uses seed + i."""

    max_tokens: int = 128
    temperature: float = 0.8
    seed: int = 0


def default_sampling(folder: Path | None) -> Sampling:
    """Our defaults, overridden by the model's generation_config.json."""
    given = sampling_defaults(folder).given
    return Sampling(**{name: value for name, value in given.items() if name in MODEL_FIELDS})
