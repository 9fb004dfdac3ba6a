"""Which dtype a model is computed in: the rule behind `"auto"`, and what is said of one that was asked for.

`auto` chooses between fp32 and a 16-bit format, never below 16 bits. It goes by rates that were measured on the device,
at the shapes of the run, and never by the name of an architecture: CPUs without bf16 units emulate bf16 5 to 300 times
slower than fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.layout import Precision

WIDE: Precision = "fp32"
SIXTEEN_BIT: tuple[Precision, ...] = ("bf16", "fp16")
GAIN = 1.15
"""speed-up over fp32 from which a 16-bit format is worth its rounding"""
EMULATED = 0.5
"""of fp32's GEMM rate: a narrower format that is slower than this has no units of its own here. Measured
2026-11-17: 0.2 (Skylake with AVX-512), 0.01 (the same held to AVX2); reported: 0.003 (Neoverse N1); from the demo of
2026-11-16: 1.8 (a Xeon with AMX)"""
WARN, REFUSE = 2.0, 10.0
"""times slower than fp32 from which a format that was asked for gets a warning, and is refused"""


@dataclass(frozen=True, kw_only=True)
class DtypeRate:
    """What a device reaches in one dtype, FLOP/s."""

    gemm: float
    """matrix multiplication at the shapes of the run"""
    attention: float | None = None
    """fused attention; none: not known, GEMM speaks for it"""
    decode: float | None = None
    """GEMM of a few rows with weights from memory, where bytes count more than FLOPs; none: not known"""
    emulated: bool = False
    """found to have no units of its own"""


@dataclass(frozen=True, kw_only=True)
class DtypeRates:
    """What a device reaches in each dtype."""

    by_dtype: Mapping[str, DtypeRate]
    """dtype -> rates; fp32 is always among them"""
    source: str
    """where they are from: 'measured 2026-11-17', 'a probe', 'the catalogue', 'CPU feature flags'"""

    def __post_init__(self) -> None:
        assert WIDE in self.by_dtype, "every device computes in fp32"

    def speedup(self, dtype: str, of: Literal["gemm", "attention", "decode"] = "gemm") -> float | None:
        """Rate of a dtype over fp32's; None where one of them is not known."""
        mine, wide = self.by_dtype.get(dtype), self.by_dtype[WIDE]
        rate, base = (getattr(one, of) if one is not None else None for one in (mine, wide))
        return rate / base if rate and base else None

    def is_emulated(self, dtype: str) -> bool:
        found = self.by_dtype.get(dtype)
        return found is not None and found.emulated


@dataclass(frozen=True, kw_only=True)
class DtypeChoice:
    """A dtype and why it was taken."""

    dtype: Precision
    """what is computed in"""
    reason: str
    """one line for the plan, the run and the screen"""


def training_dtype(rates: DtypeRates) -> DtypeChoice:
    """16 bits where GEMM and attention both gain enough."""
    half = _candidate(rates, WIDE)
    if half is None:
        return DtypeChoice(dtype=WIDE, reason=_why_wide(rates))
    gains = {"GEMM": rates.speedup(half), "attention": rates.speedup(half, "attention")}
    return _choice(half, {name: gain for name, gain in gains.items() if gain is not None}, rates)


def serving_dtype(rates: DtypeRates, *, stored: str, tokens_in: float, tokens_out: float) -> DtypeChoice:
    """16 bits where the traffic's prompts (GEMM) and tokens one by one (bytes of weights, mostly) gain enough
    together. A model stored in a 16-bit format is served in that or in fp32: the other would change its weights."""
    half = _candidate(rates, stored)
    if half is None:
        return DtypeChoice(dtype=WIDE, reason=_why_wide(rates))
    mine, wide = rates.by_dtype[half], rates.by_dtype[WIDE]
    gain = _token_s(wide, tokens_in, tokens_out) / _token_s(mine, tokens_in, tokens_out)
    return _choice(half, {"prompts and decoding": gain}, rates)


def check_asked(dtype: str, rates: DtypeRates, key: str) -> str:
    """What to warn of about a dtype that was asked for, '' where it is fine; BadRecipe where it makes no sense here."""
    if dtype not in SIXTEEN_BIT:
        return ""
    slower = 1 / (rates.speedup(dtype) or 1.0)
    if slower < WARN:
        return ""
    emulated = " (emulated)" if rates.is_emulated(dtype) else ""
    said = f"GEMM in {dtype}{emulated} is {slower:.3g} × slower than in fp32 on this device ({rates.source})"
    if slower >= REFUSE:
        raise BadRecipe(f"{said}; try --set {key}=auto or --set {key}=fp32")
    return f"{said}; --set {key}=auto would take fp32"


def _candidate(rates: DtypeRates, stored: str) -> Precision | None:
    """The 16-bit format to compare with fp32: the stored one; else bf16, and fp16 where only bf16 is emulated."""
    order = tuple(half for half in SIXTEEN_BIT if stored not in SIXTEEN_BIT or half == stored)
    return next((half for half in order if half in rates.by_dtype and not rates.is_emulated(half)), None)


def _choice(half: Precision, gains: Mapping[str, float], rates: DtypeRates) -> DtypeChoice:
    shown = " and ".join(f"{name} {gain:.3g} ×" for name, gain in gains.items())
    taken = bool(gains) and min(gains.values()) >= GAIN
    if taken:
        return DtypeChoice(dtype=half, reason=f"{half}: {shown} as fast as fp32 ({rates.source})")
    return DtypeChoice(dtype=WIDE, reason=f"fp32: {half} gains too little, {shown} ({rates.source})")


def _why_wide(rates: DtypeRates) -> str:
    emulated = [half for half in SIXTEEN_BIT if rates.is_emulated(half)]
    if not emulated:
        return f"fp32: no other format is known here ({rates.source})"
    gain = rates.speedup(emulated[0])
    rate = f", GEMM {gain:.2g} × as fast as fp32" if gain else ""
    names = f"{' and '.join(emulated)} {'is' if len(emulated) == 1 else 'are'}"
    return f"fp32: {names} emulated here{rate} ({rates.source})"


def _token_s(rate: DtypeRate, tokens_in: float, tokens_out: float) -> float:
    """Seconds of a request's tokens, for one FLOP each."""
    return tokens_in / rate.gemm + tokens_out / (rate.decode or rate.gemm)
