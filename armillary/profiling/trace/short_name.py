"""A kernel's name for people: torch's are a thousand characters of template arguments, of which one word tells."""

from __future__ import annotations

import re

_TELLING = (
    re.compile(r"\b(?!Binary|Unary|BUnary|AUnary|OpMath)\w+Functor\b|\b\w+_functor\b"),
    re.compile(r"\w+_kernel_cuda\b|\w+_cuda_out\b"),
    re.compile(r"\w+(?:gemm|Gemm|conv|fprop|dgrad|wgrad)\w*"),
    re.compile(r"\w+(?:Functor|Ops?)\b"),
)
"""what a template is filled with, the most telling first"""


def short_name(name: str, longest: int = 70) -> str:
    """'elementwise_kernel (MulFunctor)': the function's own name, and what it does with each element."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base, template, inside = plain.partition("<")
    if not template or base.startswith("aten::"):
        text = plain
    else:
        base = base.partition("(")[0].rsplit("::", 1)[-1]
        told = next((match.group() for pattern in _TELLING if (match := pattern.search(inside))), "")
        text = f"{base} ({told})" if told else base
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
