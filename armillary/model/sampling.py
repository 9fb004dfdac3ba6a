"""Sampling options of `armillary.generate` and the generate verb, their defaults, and the checks of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.errors import BadInput, BadModel
from armillary.model.generation_config import sampling_defaults

if TYPE_CHECKING:
    from armillary.model.text.tokenizer import Tokenizer
    from armillary.model.transformer import Transformer

MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""fields of `Sampling` that a model's generation_config.json may set"""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled."""

    max_tokens: int = 128
    """most tokens to generate"""
    temperature: float = 0.8
    """0 is greedy"""
    top_k: int = 0
    """keep the k likeliest tokens; 0: all"""
    top_p: float = 1.0
    """keep the likeliest tokens whose probabilities reach p"""
    min_p: float = 0.0
    """drop tokens less likely than this share of the likeliest one's probability"""
    repetition_penalty: float = 1.0
    """above 1: logits of earlier tokens, those of the prompt too, are divided by it, negative ones multiplied"""
    seed: int = 0
    """prompt i uses seed + i"""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens={self.max_tokens} generates nothing; ask for at least 1")
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise BadInput("sampling needs temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0")
        if not (0 <= self.min_p <= 1 and 0 < self.repetition_penalty < math.inf):
            raise BadInput("sampling needs 0 ≤ min_p ≤ 1 and repetition_penalty > 0")
        if not 0 <= self.seed < 2**62:
            raise BadInput(f"seed={self.seed} is not between 0 and 2^62; use a small whole number")


def default_sampling(folder: Path | None) -> Sampling:
    """Our defaults, overridden by the model's generation_config.json."""
    given = sampling_defaults(folder).given
    return Sampling(**{name: value for name, value in given.items() if name in MODEL_FIELDS})


def check_tokenizer(model: Transformer, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids that the model does not have."""
    if tokenizer.vocab_size > model.config.vocab:
        rows = f"the model has {model.config.vocab} rows and its tokenizer ids up to {tokenizer.vocab_size - 1}"
        raise BadModel(f"{model.config.name}: {rows}; use the tokenizer the model was trained with")


def check_prompts(model: Transformer, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Refuse prompts that the model cannot continue."""
    vocab, context = model.config.vocab, model.config.context
    if not prompts:
        raise BadInput("there is no prompt; give at least one")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput(f"prompt {i + 1} is empty; give at least one token")
        if max(prompt) >= vocab or min(prompt) < 0:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise BadInput(
                f"prompt {i + 1} has token {wrong} outside the model's vocabulary of {vocab}; use its tokenizer"
            )
        left = context - len(prompt)
        if left < sampling.max_tokens:
            wanted = f"{len(prompt)} + {sampling.max_tokens} tokens exceed the context of {context}"
            fix = f"ask for at most {left}" if left > 0 else "shorten the prompt"
            raise BadInput(f"prompt {i + 1}: {wanted}; {fix}")
