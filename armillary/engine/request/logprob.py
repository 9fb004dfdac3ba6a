"""Log-probabilities as clients get them."""

from __future__ import annotations

from typing import NamedTuple


class Logprob(NamedTuple):
    """Of one token of an answer or a prompt, by the model alone: before penalties, biases and filters."""

    token: int
    """the token that stands there"""
    value: float
    """natural logarithm of its probability"""
    top: tuple[tuple[int, float], ...]
    """the likeliest tokens and theirs, as many as were asked for"""
