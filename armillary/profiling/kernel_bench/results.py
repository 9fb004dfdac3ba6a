"""Results of the kernel bench: a row per case, a figure per version, and whether the target is met."""

from dataclasses import dataclass

from armillary.profiling.kernel_bench.targets import Target

_OURS = "triton"
_SAME = 1.01
"""times as long: two timings of one kernel differ by this much"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One version of one case; rates are bytes/s or FLOP/s, as the ceiling is, and shares those of the ceiling. A
    version that was `refused` was not timed."""

    version: str
    forward_s: float | None = None
    backward_s: float | None = None
    forward_rate: float | None = None
    backward_rate: float | None = None
    forward_share: float | None = None
    backward_share: float | None = None
    error: float | None = None
    """relative, against the wide reference"""
    refused: str = ""
    method: str = ""
    rival: bool = False
    """timed for comparison, never chosen"""
    extra_bytes: float | None = None
    """memory beyond the gradients, where there is a target for it"""

    @property
    def seconds(self) -> float | None:
        return None if self.forward_s is None else self.forward_s + (self.backward_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One case of one operation: the version that choose() takes, and all that were measured; `name` says whose
    shape it is."""

    op: str
    name: str
    shape: str
    ceiling: str
    chosen: str
    measured: tuple[Measured, ...]
    failed: str = ""
    """why there is nothing: the reference itself could not be run"""
    bar: Target | None = None
    """the target of this case, where there is one"""
    seconds: float = 0.0
    held_bytes: float = 0.0
    """GPU memory that the bench still has after the case"""

    def of(self, version: str) -> Measured | None:
        return next((measured for measured in self.measured if measured.version == version), None)

    @property
    def ours(self) -> Measured | None:
        """Our own kernel: the best of those in Triton."""
        own = [measured for measured in self.measured if measured.version.startswith(_OURS)]
        return min(
            own, key=lambda measured: measured.seconds if measured.seconds is not None else float("inf"), default=None
        )

    def misses(self, measured: Measured | None) -> list[str]:
        """What of the target this version misses; nothing where there is no target."""
        if self.bar is None:
            return []
        if measured is None or measured.seconds is None:
            return ["not timed"]
        bar = self.bar
        missed = [
            f"{way} {100 * share:.1f}% < {100 * least:.0f}%"
            for way, share, least in (
                ("forward", measured.forward_share, bar.forward),
                ("backward", measured.backward_share, bar.backward),
            )
            if least is not None and share is not None and share < least
        ]
        if bar.extra_bytes is not None and measured.extra_bytes is not None and measured.extra_bytes > bar.extra_bytes:
            missed.append(f"{measured.extra_bytes / 1e9:.2f} GB extra > {bar.extra_bytes / 1e9:.1f}")
        rivals = [rival for rival in self.measured if rival.version.startswith(bar.never_behind)]
        return missed + [text for rival in rivals for text in _behind(measured, rival)]


def _behind(measured: Measured, rival: Measured) -> list[str]:
    """In what a version takes longer than a rival: in all, else in one direction."""
    if _longer(measured.seconds, rival.seconds):
        return [f"behind {rival.version}"]
    ways = (("forward", measured.forward_s, rival.forward_s), ("backward", measured.backward_s, rival.backward_s))
    return [f"{way} behind {rival.version}" for way, own, other in ways if _longer(own, other)]


def _longer(own: float | None, other: float | None) -> bool:
    return own is not None and other is not None and other * _SAME < own


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """What a run of the bench found; ceilings are bytes/s or FLOP/s of this run, and for the cases that are left
    there was no time."""

    device: str
    date: str
    ceilings: dict[str, float]
    rows: tuple[KernelRow, ...]
    skipped: int
    warm_s: float
    """seconds of compiling ahead"""
    seconds: float
    left: tuple[str, ...] = ()
