"""A problem: how to make a run that has it, and which answers of a diagnosis are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from armillary.spec.gauges import Loop
from armillary.store.home import Home

ACTION = "(not in the recipe)"
"""stands for a lever that changes no key of the recipe: a machine to replace, code to change"""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How large a run is to be, and how bad its problem."""

    size: float = 1.0
    """of the model: 2 is twice as wide"""
    severity: float = 1.0
    """of the problem: 2 is twice as bad"""
    seed: int = 0
    """of weights, text order, prompts and arrivals"""


Make = Callable[[Wish, Home], Path]
"""make(wish, home) -> folder of a finished run"""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One planted problem, or a healthy run."""

    name: str
    """what --only takes"""
    says: str
    """what is wrong, for people"""
    make: Make
    """makes the run, or names the one that was recorded"""
    loop: Loop | None
    """the ring that is to be named; none: healthy, nothing is"""
    causes: tuple[str, ...] = ()
    """causes that are right"""
    levers: tuple[str, ...] = ()
    """keys of the recipe, or flags of another program, of which the first lever must change one; ACTION: it changes no
    key; *: any lever is right"""
    recorded: bool = False
    """made earlier, on a machine named in the run's plan"""
    disturbed: bool = False
    """another program computes beside it on purpose, so that it is made once, however loud that is"""
    simulated: bool = False
    """a log or metrics page that a small model of another program wrote"""

    @property
    def live(self) -> bool:
        """Made now, by our trainer or engine."""
        return not (self.recorded or self.simulated)

    @property
    def healthy(self) -> bool:
        return self.loop is None
