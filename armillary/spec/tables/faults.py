"""What goes wrong in a simulated training run: the recipe's table [faults]."""

from dataclasses import dataclass

from armillary.spec.tables.checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Failures and stragglers of a training run that `armillary simulate` plays through."""

    device_mtbf_h: float = 50_000.0
    """hours between failures of one device that stop the run (Llama 3 405B: 50,700 device-hours each, arXiv
    2407.21783, table 5)"""
    restart_s: float = 600.0
    """time from a failure to the next step: finding it, replacing the node, starting, loading the checkpoint"""
    checkpoint_s: float | None = None
    """time that a checkpoint stops training; none: all its bytes at the rate at which the nodes write"""
    checkpoint_interval_s: float | None = None
    """training between two checkpoints; none: train.save_every, or the interval with the highest goodput"""
    straggler_mtbf_h: float | None = None
    """hours between two times that one device becomes slow; none: none does"""
    straggler_slowdown: float = 1.3
    """time of a slow device's computation over that of others"""
    straggler_s: float = 3600.0
    """time until a slow device is found and replaced, which takes a restart"""
    noise: float = 0.0
    """coefficient of variation of a stage's forward and backward passes (lognormal)"""
    days: float = 14.0
    """longest run that is played through; it ends earlier with its last step"""
    seed: int = 0
    """of failures, slow devices and noise"""

    def __post_init__(self) -> None:
        above_zero(self, "faults", "device_mtbf_h", "checkpoint_interval_s", "straggler_mtbf_h", "straggler_s", "days")
        at_least(self, "faults", 0, "restart_s", "checkpoint_s", "noise", "seed")
        at_least(self, "faults", 1, "straggler_slowdown")
