"""Signs of a prompt injection: phrases by which texts try to replace a model's instructions, each with a weight.

A heuristic: it finds the common forms and is no defence against somebody who knows it. Weights and limit were set by
hand so that one unmistakable phrase, or two suspicious ones, count as an injection.
"""

from __future__ import annotations

import re
import unicodedata

from armillary.fleet.guards.guard_verdict import Span, SpanCheck

LIMIT = 1.0
_SIGNS: tuple[tuple[float, str], ...] = (
    (1.0, r"\b(?:ignore|disregard|forget|override|bypass)\b.{0,40}\b(?:previous|prior|above|earlier|all|your|system)\b"
          r".{0,30}\b(?:instructions?|prompts?|rules?|directions?|guidelines?|context|messages?)\b"),
    (1.0, r"\b(?:reveal|show|print|repeat|output|leak|tell me)\b.{0,40}\b(?:system|hidden|initial|secret|original)\b"
          r".{0,20}\b(?:prompt|instructions?|message|rules)\b"),
    (1.0, r"<\|(?:im_start|im_end|system|start_header_id|endoftext)\|?>|\[/?(?:INST|SYS)\]|<</?SYS>>"),
    (0.6, r"\byou are (?:now|no longer)\b.{0,60}\b(?:dan|unrestricted|jailbroken|unfiltered|developer mode|bound)\b"),
    (0.6, r"\b(?:developer|god|jailbreak|dan|admin|sudo) mode\b"),
    (0.6, r"\bdo anything now\b|\bwithout (?:any )?(?:restrictions?|filters?|limitations?|censorship)\b"),
    (0.5, r"\b(?:pretend|act|behave) (?:to be|as if|as though|as)\b.{0,40}\b(?:no|without|unrestricted|evil)\b"),
    (0.5, r"\bnew (?:system )?(?:instructions?|prompt|task)\s*:"),
    (0.5, r"^\s*(?:system|assistant)\s*:"),
    (0.4, r"\b(?:base64|rot13|hex)\b.{0,30}\b(?:decode|decoded|execute|follow)\b"),
)  # fmt: skip
_COMPILED = tuple((weight, re.compile(text, re.IGNORECASE | re.MULTILINE)) for weight, text in _SIGNS)
_HIDDEN = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\U000e0000-\U000e007f]")


def injection_score(text: str) -> float:
    """Sum of the weights of the signs in a text; `LIMIT` and more is taken for an injection."""
    plain = unicodedata.normalize("NFKC", _HIDDEN.sub("", text))
    plain = re.sub(r"[ \t]+", " ", plain)
    return sum(weight for weight, pattern in _COMPILED if pattern.search(plain))


def injection(limit: float = LIMIT) -> SpanCheck:
    """The complete text, where its score reaches the limit."""
    return lambda text: [Span(0, len(text), "prompt injection")] if injection_score(text) >= limit else []
