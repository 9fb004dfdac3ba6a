"""Counters of an engine since it started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """What has happened so far; only grows."""

    steps: int = 0
    """decisions made"""
    submitted: int = 0
    """requests taken in"""
    finished: int = 0
    """requests of which every answer is complete"""
    aborted: int = 0
    """answers whose client went away or whose time was over"""
    rejected: int = 0
    """requests refused because too many were waiting"""
    errors: int = 0
    """answers that ended in an error"""
    preempted: int = 0
    """times a running sequence was put back"""
    shrunk: int = 0
    """times a step found no memory and was made smaller"""
    recomputed: int = 0
    """tokens that were in the cache and had to be given up by that"""
    looked_up: int = 0
    """prompt tokens looked up in the prefix cache; what is computed again does not count"""
    found: int = 0
    """prompt tokens found there"""
    repeated: int = 0
    """prompt tokens that an earlier text began with too, found or not"""
    misses: Counter[str] = field(default_factory=Counter)
    """requests by why no more of their prompts was found"""
    tokens_in: int = 0
    """prompt tokens of answers that have started"""
    tokens_out: int = 0
    """tokens of answers"""
    discarded: int = 0
    """tokens drawn for answers that were over by then: the price of deciding a step ahead"""
