"""The guards of a model in the gateway's configuration.

guards = [
  { kind = "personal", action = "mask" },
  { kind = "deny", terms = ["project bluebird"] },
  { kind = "injection", on = "input" },
  { kind = "moderation", url = "http://127.0.0.1:8010", model = "llama-guard" },
]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from armillary.errors import BadRecipe

_ASKS = ("classifier", "moderation")


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """One check."""

    kind: Literal["deny", "pattern", "personal", "injection", "classifier", "moderation"]
    """deny: terms; pattern: regular expressions; personal: personal data; injection: signs of a prompt injection;
    classifier: a model behind /predict; moderation: a chat model that answers safe or unsafe"""
    on: Literal["input", "output", "both"] = "both"
    action: Literal["block", "mask"] = "block"
    """what a match leads to; classifier, moderation and injection only block"""
    name: str = ""
    """in metrics and errors; empty: its kind"""
    terms: tuple[str, ...] = ()
    """deny: words and phrases, in any case"""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """pattern: name -> regular expression"""
    kinds: tuple[str, ...] = ()
    """personal: kinds to look for; empty: all"""
    url: str = ""
    """classifier, moderation: address of the server"""
    model: str = ""
    """moderation: its model"""
    features: int = 1024
    """classifier: length of the hashed trigrams that it takes"""
    label: int = 1
    """classifier: index of the output that means unsafe"""
    threshold: float = 0.5
    """classifier: score from which a text is blocked"""
    unsafe: tuple[str, ...] = ("unsafe", "yes")
    """moderation: beginnings of an answer that mean unsafe"""
    timeout_s: float = 2.0
    """classifier, moderation: time limit of a check"""
    on_failure: Literal["refuse", "allow"] = "refuse"
    """requests while that server does not answer: refused with 503, or passed unchecked"""

    def __post_init__(self) -> None:
        if self.kind in _ASKS and (
            urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname
        ):
            raise BadRecipe(f'a {self.kind} guard needs the address of its server; add url = "http://127.0.0.1:8010"')
        if self.kind == "moderation" and not self.model:
            raise BadRecipe('a moderation guard needs the name of its model; add model = "…"')
        if self.kind in (*_ASKS, "injection") and self.action == "mask":
            raise BadRecipe(f"a {self.kind} guard has nothing to mask; leave action out")
        if self.timeout_s <= 0 or self.features < 1:
            raise BadRecipe(f"timeout_s and features of a {self.kind} guard are above 0; correct them")

    @property
    def title(self) -> str:
        return self.name or self.kind
