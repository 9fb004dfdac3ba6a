"""One request as it enters the engine: tokens, wishes, and its place among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from armillary.engine.request.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Tokens in, and what is wanted of them."""

    id: str
    """name; no other live request may have it"""
    prompt: Sequence[int]
    """token ids"""
    params: SamplingParams = field(default_factory=SamplingParams)
    """how the answer is made"""
    priority: int = 0
    """smaller goes first; each step is worth serve.ageing_s seconds of waiting"""
    timeout_s: float | None = None
    """given up so long after it came; none: never"""
    salt: str = ""
    """only requests with the same salt share cached blocks"""
    adapter: str = ""
    """adapter the prompt is computed with; cached blocks are its own"""
