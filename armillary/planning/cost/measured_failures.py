"""The checkpoint interval that a run's own failures and checkpoints suggest, and the goodput they predict.

The account (store/goodput.py) gives the cost of a checkpoint, of a restart, and the time between failures; before the
first failure the published rate per device stands in for the last.
"""

from dataclasses import dataclass
from math import log1p

from armillary.planning.cost.failures import Failures, Goodput, expected_goodput
from armillary.store.goodput import GoodputAccount
from armillary.units import seconds_text


@dataclass(frozen=True, kw_only=True)
class MeasuredFailures:
    """A run's failures: `as_run` predicts its goodput at the interval it had, `best` at the best one. Both are of the
    time in steps, checkpoints and restarts, as is `measured_fraction`; loading, validation and idle time are not."""

    num_failures: int
    measured_fraction: float
    as_run: Goodput
    best: Goodput

    @property
    def is_rate_measured(self) -> bool:
        return self.num_failures > 0

    def text(self) -> str:
        """'every 4.1 min (a save costs 1.2 s, a failure every 2.1 h; now every 10 min)'"""
        failures = self.best.failures
        rate = f"a failure every {seconds_text(failures.mtbf_s)}" + ("" if self.is_rate_measured else ", as published")
        return (
            f"every {seconds_text(self.best.interval_s)} of steps (a save costs {seconds_text(failures.checkpoint_s)}, "
            f"{rate}; now every {seconds_text(self.as_run.interval_s)})"
        )

    def goodput_text(self) -> str:
        return (
            f"{self.measured_fraction:.1%} of steps, saves and restarts (predicted {self.as_run.goodput_fraction:.1%}, "
            f"at the suggested interval {self.best.goodput_fraction:.1%})"
        )


def measured_failures(account: GoodputAccount, *, num_devices: int = 1) -> MeasuredFailures | None:
    """None where the run has saved no checkpoint or taken no step yet."""
    stepped_s = account.seconds["useful"] + account.seconds["repeated"]
    if account.save_s is None or account.seconds["useful"] <= 0:
        return None
    covered_s = stepped_s + account.seconds["saving"] + account.restart_s
    if account.num_failures:
        mtbf_s = covered_s / account.num_failures
        failures = Failures(
            num_devices=1,
            device_mtbf_s=mtbf_s,
            checkpoint_s=account.save_s,
            restart_s=_whole_restart_s(account.restart_s / account.num_failures, mtbf_s),
        )
    else:
        failures = Failures(num_devices=num_devices, checkpoint_s=account.save_s)
    return MeasuredFailures(
        num_failures=account.num_failures,
        measured_fraction=account.seconds["useful"] / covered_s,
        as_run=expected_goodput(failures, stepped_s / account.num_saves),
        best=expected_goodput(failures),
    )


def _whole_restart_s(mean_s: float, mtbf_s: float) -> float:
    """The time R of a restart that nothing interrupts, from the mean over all: the next failure cuts some short, so the
    mean is M·(1 − e^(−R/M)). The formula of goodput takes R and adds those interruptions by itself."""
    return -mtbf_s * log1p(-mean_s / mtbf_s)
