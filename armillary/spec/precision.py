"""Choice of the compute dtype: the rule behind `"auto"`, and warnings about a requested dtype.

`auto` chooses between fp32 and a 16-bit dtype, never below 16 bits. It compares rates measured on the device at the
shapes of the run, never the name of an architecture: CPUs without bf16 units emulate bf16 5 to 300 times slower than
fp32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.layout import Precision

WIDE: Precision = "fp32"
SIXTEEN_BIT: tuple[Precision, ...] = ("bf16", "fp16")
GAIN = 1.15
"""speed-up over fp32 from which a 16-bit dtype is worth its rounding"""
EMULATED = 0.5
"""share of fp32's GEMM rate below which a narrower dtype has no units of its own here. Measured 2026-11-17: 0.2
(Skylake with AVX-512), 0.01 (the same limited to AVX2); reported: 0.003 (Neoverse N1); from the demo of 2026-11-16: 1.8
(a Xeon with AMX)"""
UNITS_UNUSED = 0.05
"""the same share for a dtype that the CPU has units for: below it, torch does not use them; above it, other work was in
the way (0.5 of bf16 with AMX beside four busy processes on two cores, 2026-11-19)"""
WARN, REFUSE = 2.0, 10.0
"""times slower than fp32 from which a requested dtype gets a warning, and is refused"""


@dataclass(frozen=True, kw_only=True)
class DtypeRate:
    """Rates of a device in one dtype, FLOP/s, None where unknown: GEMMs at the shapes of the run, fused attention, and
    decode (GEMMs of a few rows, bound by the bytes of the weights). Emulated: the dtype has no units of its own."""

    gemm: float
    attention: float | None = None
    decode: float | None = None
    emulated: bool = False


@dataclass(frozen=True, kw_only=True)
class DtypeRates:
    """Rates of a device in each dtype, always with fp32."""

    by_dtype: Mapping[str, DtypeRate]
    source: str
    """source: 'measured 2026-11-17', 'a probe', 'the catalogue', 'CPU feature flags'"""

    def __post_init__(self) -> None:
        assert WIDE in self.by_dtype, "every device computes in fp32"

    def speedup(self, dtype: str, of: Literal["gemm", "attention", "decode"] = "gemm") -> float | None:
        """Rate of a dtype over fp32's; None where one of them is unknown."""
        rate, base = (getattr(self.by_dtype.get(name), of, None) for name in (dtype, WIDE))
        return rate / base if rate and base else None

    def is_emulated(self, dtype: str) -> bool:
        return dtype in self.by_dtype and self.by_dtype[dtype].emulated


@dataclass(frozen=True, kw_only=True)
class DtypeChoice:
    """A dtype, and one line on the reason for it."""

    dtype: Precision
    reason: str


def training_dtype(rates: DtypeRates) -> DtypeChoice:
    """16 bits where GEMMs and attention both gain enough."""
    narrow = _candidate(rates, WIDE)
    if narrow is None:
        return DtypeChoice(dtype=WIDE, reason=_why_wide(rates))
    gains = {"GEMM": rates.speedup(narrow), "attention": rates.speedup(narrow, "attention")}
    return _choice(narrow, {name: gain for name, gain in gains.items() if gain is not None}, rates)


def serving_dtype(rates: DtypeRates, *, stored: str, tokens_in: float, tokens_out: float) -> DtypeChoice:
    """16 bits where the prefill (GEMMs) and decode (mostly bytes of weights) of the traffic gain enough together. A
    model stored in a 16-bit dtype is served in that or in fp32: the other would change its weights."""
    narrow = _candidate(rates, stored)
    if narrow is None:
        return DtypeChoice(dtype=WIDE, reason=_why_wide(rates))
    fp32_s, narrow_s = (_token_s(rates.by_dtype[dtype], tokens_in, tokens_out) for dtype in (WIDE, narrow))
    return _choice(narrow, {"prompts and decoding": fp32_s / narrow_s}, rates)


def check_asked(dtype: str, rates: DtypeRates, key: str) -> str:
    """A warning about a requested dtype, '' where it is fine; BadRecipe where it makes no sense here."""
    if dtype not in SIXTEEN_BIT:
        return ""
    slower = 1 / (rates.speedup(dtype) or 1.0)
    if slower < WARN:
        return ""
    emulated = " (emulated)" if rates.is_emulated(dtype) else ""
    text = f"GEMM in {dtype}{emulated} is {slower:.3g} × slower than in fp32 on this device ({rates.source})"
    if slower >= REFUSE:
        raise BadRecipe(f"{text}; try --set {key}=auto or --set {key}=fp32")
    return f"{text}; --set {key}=auto would take fp32"


def _candidate(rates: DtypeRates, stored: str) -> Precision | None:
    """The 16-bit dtype to compare with fp32: the stored one; else bf16, and fp16 where only bf16 is emulated."""
    order = tuple(dtype for dtype in SIXTEEN_BIT if stored not in SIXTEEN_BIT or dtype == stored)
    return next((dtype for dtype in order if dtype in rates.by_dtype and not rates.is_emulated(dtype)), None)


def _choice(narrow: Precision, gains: Mapping[str, float], rates: DtypeRates) -> DtypeChoice:
    text = " and ".join(f"{name} {gain:.3g} ×" for name, gain in gains.items())
    if gains and min(gains.values()) >= GAIN:
        return DtypeChoice(dtype=narrow, reason=f"{narrow}: {text} as fast as fp32 ({rates.source})")
    return DtypeChoice(dtype=WIDE, reason=f"fp32: {narrow} gains too little, {text} ({rates.source})")


def _why_wide(rates: DtypeRates) -> str:
    emulated = [dtype for dtype in SIXTEEN_BIT if rates.is_emulated(dtype)]
    if not emulated:
        return f"fp32: no other dtype is known here ({rates.source})"
    gain = rates.speedup(emulated[0])
    rate = f", GEMM {gain:.2g} × as fast as fp32" if gain else ""
    names = f"{' and '.join(emulated)} {'is' if len(emulated) == 1 else 'are'}"
    return f"fp32: {names} emulated here{rate} ({rates.source})"


def _token_s(rate: DtypeRate, tokens_in: float, tokens_out: float) -> float:
    """Seconds of a request's tokens, at one FLOP each."""
    return tokens_in / rate.gemm + tokens_out / (rate.decode or rate.gemm)
