"""Checks with regular expressions: deny lists, patterns of one's own, and personal data.

Personal data is found by form and, where a form has one, by its checksum: card numbers by Luhn's, IBANs modulo 97.
Names and addresses have no form; for those a classifier is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from armillary.errors import BadRecipe
from armillary.fleet.guards.guard_verdict import Span, SpanCheck


def deny_list(terms: Sequence[str]) -> SpanCheck:
    """Whole words or phrases, in any case; white space between words may differ."""
    texts = [r"\s+".join(map(re.escape, term.split())) for term in terms if term.strip()]
    if not texts:
        raise BadRecipe('a deny list has no terms; add terms = ["…"]')
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(texts, key=len, reverse=True))})(?!\w)", re.IGNORECASE)
    return lambda text: [Span(match.start(), match.end(), "denied") for match in pattern.finditer(text)]


def patterns(expressions: Mapping[str, str]) -> SpanCheck:
    """Regular expressions by the name of what they match."""
    compiled = {}
    for name, expression in expressions.items():
        try:
            compiled[name] = re.compile(expression)
        except re.error as error:
            raise BadRecipe(f"pattern {name} is no regular expression ({error}); correct it") from None
        if compiled[name].match(""):
            raise BadRecipe(f"pattern {name} matches the empty text; make it match something")

    def check(text: str) -> list[Span]:
        return [
            Span(match.start(), match.end(), name)
            for name, pattern in compiled.items()
            for match in pattern.finditer(text)
        ]

    return check


def _luhn(text: str) -> bool:
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) if place % 2 else digit for place, digit in enumerate(reversed(digits))]
    return 13 <= len(digits) <= 19 and sum(doubled) % 10 == 0 and len(set(digits)) > 1


def _iban(text: str) -> bool:
    plain = re.sub(r"\s", "", text).upper()
    moved = plain[4:] + plain[:4]
    return 15 <= len(plain) <= 34 and int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _ip(text: str) -> bool:
    return all(int(part) < 256 for part in text.split("."))


_PERSONAL: Mapping[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "email": (
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,5}"),
        lambda text: True,
    ),
    "card": (re.compile(r"(?<![\d-])\d(?:[ -]?\d){12,18}(?![\d-])"), _luhn),
    "iban": (re.compile(r"(?<!\w)[A-Za-z]{2}\d{2}(?: ?[A-Za-z0-9]){11,30}(?!\w)"), _iban),
    "ssn": (re.compile(r"(?<![\d-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\d-])"), lambda text: True),
    "phone": (
        re.compile(
            r"(?<![\w+])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?|\(\d{3}\) ?)\d{2,4}(?:[ .-]?\d{2,4}){1,4}(?!\w)"
        ),
        lambda text: 8 <= sum(map(str.isdigit, text)) <= 15,
    ),
    "ip": (re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), _ip),
    "secret": (
        re.compile(
            r"(?<!\w)(?:sk-[A-Za-z0-9_-]{20,200}|ghp_[A-Za-z0-9]{36}|AKIA[A-Z0-9]{16}|ak-[0-9a-f]{8}-[\w-]{40,60})"
        ),
        lambda text: True,
    ),
}
PERSONAL_KINDS = tuple(_PERSONAL)
LONGEST = 256
"""characters of the longest match, which a stream holds back"""


def personal_data(kinds: Sequence[str] = PERSONAL_KINDS) -> SpanCheck:
    """Addresses of mail and network, card and bank numbers, telephone numbers, keys of providers."""
    unknown = [kind for kind in kinds if kind not in _PERSONAL]
    if unknown:
        raise BadRecipe(f"no kind of personal data '{unknown[0]}'; one of: {', '.join(_PERSONAL)}")

    def check(text: str) -> list[Span]:
        spans, taken = list[Span](), list[Span]()
        for kind in kinds:
            pattern, is_valid = _PERSONAL[kind]
            spans += [Span(m.start(), m.end(), kind) for m in pattern.finditer(text) if is_valid(m.group())]
        for span in sorted(spans):
            if not taken or span.start >= taken[-1].end:
                taken.append(span)
        return taken

    return check
