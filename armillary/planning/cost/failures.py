"""Failures: the goodput of a run and the best checkpoint interval, from failure rates and the cost of both.

With mean time between failures M (of all devices together), a checkpoint that stops training for δ and a restart of R:

    Young (1974)          τ = √(2·δ·M)
    Daly (2006), eq. 37   τ = √(2·δ·M)·(1 + ⅓·√(δ/2M) + ⅑·(δ/2M)) − δ for δ < 2M, else M
    goodput at τ          τ / (M·e^(R/M)·(e^((τ+δ)/M) − 1)): exact for exponential failures, which may also strike
                          checkpoints and restarts (Daly 2006, eq. 20)
    exact optimum         e^(−(τ+δ)/M) = 1 − τ/M, solved by Lambert's W: τ = M·(1 + W(−e^(−1−δ/M)))

J. W. Young, CACM 17 (1974); J. T. Daly, Future Generation Computer Systems 22 (2006).
"""

from dataclasses import dataclass
from math import exp, expm1, isfinite, log, log1p, nextafter, sqrt

from armillary.errors import BadInput
from armillary.spec.hardware import Cluster

HOUR = 3600.0
DEVICE_MTBF_H = 50_000.0
"""hours between failures of one device that stop a run, its share of host, cables and software included: Llama 3 405B
had 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv 2407.21783, table 5), 50,700 device-hours each"""
RESTART_S = 600.0
"""from a failure to the next step: detecting it, replacing the node, starting, loading the checkpoint"""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failure rate of devices that must all work, and the cost of a failure: a checkpoint stops training for
    `checkpoint_s`, and the next step runs `restart_s` after a failure."""

    num_devices: int
    device_mtbf_s: float = DEVICE_MTBF_H * HOUR
    checkpoint_s: float
    restart_s: float = RESTART_S

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise BadInput(f"{self.num_devices} devices cannot train; give at least 1")
        _positive("mean time between failures", self.device_mtbf_s)
        for name, value in (("checkpoint time", self.checkpoint_s), ("restart time", self.restart_s)):
            if not (isfinite(value) and value >= 0):
                raise BadInput(f"{name} of {value} s is not a time; give 0 or more seconds")

    @property
    def mtbf_s(self) -> float:
        """Of all devices together: rates add."""
        return self.device_mtbf_s / self.num_devices


def _positive(what: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise BadInput(f"{what} of {value} s is not a time; give more than 0 seconds")


# --- intervals


def young_s(failures: Failures) -> float:
    """Young's interval: first order, for checkpoints much shorter than the time between failures."""
    return sqrt(2 * failures.checkpoint_s * failures.mtbf_s)


def daly_s(failures: Failures) -> float:
    """Daly's higher-order interval; M where a checkpoint takes 2M or longer."""
    mtbf, cost = failures.mtbf_s, failures.checkpoint_s
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return sqrt(2 * cost * mtbf) * (1 + sqrt(share) / 3 + share / 9) - cost


def best_interval_s(failures: Failures) -> float:
    """The interval with the highest goodput, exactly: τ = M·(1 + W₀(−e^(−1−δ/M)))."""
    return failures.mtbf_s * _one_plus_lambert(failures.checkpoint_s / failures.mtbf_s)


def _one_plus_lambert(share: float) -> float:
    """x = 1 + W₀(−e^(−1−share)), the root of −log(1 − x) − x = share in [0, 1), by bisection: without the cancellation
    that W₀ (scipy.special.lambertw) has near its branch point."""
    if share <= 0:
        return 0.0
    # at the upper end −log(1 − x) = 1 + share > share + x; of a large share it would be rounded to 1
    low, high = 0.0, min(1.0 - exp(-1 - share), nextafter(1.0, 0.0))
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _shortfall(middle) < share else (low, middle)
    return (low + high) / 2


def _shortfall(x: float) -> float:
    """−log(1 − x) − x, by its series where subtraction would cancel."""
    return x * x / 2 + x**3 / 3 + x**4 / 4 if x < 1e-4 else -log1p(-x) - x


# --- goodput


def goodput(failures: Failures, interval_s: float) -> float:
    """Share of wall time spent on steps that are not lost, with a checkpoint every `interval_s` of training."""
    _positive("checkpoint interval", interval_s)
    mtbf = failures.mtbf_s
    exponent = (interval_s + failures.checkpoint_s) / mtbf
    if exponent + failures.restart_s / mtbf > 700:  # e^700 is the largest float
        return 0.0
    return min(1.0, interval_s / (mtbf * exp(failures.restart_s / mtbf) * expm1(exponent)))


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Share of wall time spent on steps that are not lost, with a checkpoint every `interval_s` of training; Young's
    and Daly's intervals are for comparison."""

    failures: Failures
    interval_s: float
    goodput_fraction: float
    young_s: float
    daly_s: float

    @property
    def interruptions_per_day(self) -> float:
        return 24 * HOUR / self.failures.mtbf_s

    def lost(self) -> dict[str, float]:
        """Shares of wall time: checkpoints, restarts, repeated steps; with the goodput they add up to 1."""
        mtbf, useful = self.failures.mtbf_s, self.goodput_fraction
        writing = useful * self.failures.checkpoint_s / self.interval_s
        restarting = min(1 - useful - writing, self.failures.restart_s / mtbf)
        return {"checkpoints": writing, "restarts": restarting, "repeated": 1 - useful - writing - restarting}


def expected_goodput(failures: Failures, interval_s: float | None = None) -> Goodput:
    """Goodput at `interval_s`, or at the best interval."""
    # without a checkpoint cost the best interval is zero; a second stands for a step
    chosen = interval_s if interval_s is not None else max(1.0, best_interval_s(failures))
    return Goodput(
        failures=failures,
        interval_s=chosen,
        goodput_fraction=goodput(failures, chosen),
        young_s=young_s(failures),
        daly_s=daly_s(failures),
    )


def per_month(share: float, hours: float = 730.0) -> float:
    """Probability of interruption per month as a rate per hour: −log(1 − share) / hours."""
    if not 0 <= share < 1:
        raise BadInput(f"a probability of {share} is not a share below 1; write it like 0.2")
    return -log(1 - share) / hours


def of_cluster(cluster: Cluster, checkpoint_s: float, **changes: float) -> Failures:
    """Failures of every device of a cluster, with the published rate unless `changes` override it."""
    return Failures(num_devices=cluster.num_devices, checkpoint_s=checkpoint_s, **changes)
