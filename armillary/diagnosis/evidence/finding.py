"""Finding: one cause that costs time, with its evidence and its levers, priced before they are applied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from armillary.diagnosis.readings.reading import Reading
from armillary.spec.gauges import GAUGES, RENAMED, Loop
from armillary.spec.plan import Plan
from armillary.units import bytes_text, count_text, dollars_text, duration_text, scaled

Cause = Literal[
    # inner loop: one device
    "compute",
    "memory_bandwidth",
    "launch_overhead",
    "data_starvation",
    "sync",
    "precision",
    "throttling",
    "idle_device",
    # training loop: many devices
    "exposed_communication",
    "bad_placement",
    "bubble",
    "straggler",
    "memory_pressure",
    "needless_recompute",
    "needless_offload",
    "expert_imbalance",
    "checkpoint_stall",
    "validation_stall",
    "failures",
    "skipped_steps",
    "dropped_tokens",
    "fragmentation",
    # product loop: serving
    "queueing",
    "prefill_interference",
    "kv_pressure",
    "preemption",
    "cache_misses",
    "too_few_replicas",
    "batch_too_small",
    "static_batching",
    "rejected_drafts",
    "adapter_thrashing",
    "over_provisioned",
    "wrong_replica_size",
    "cold_starts",
    "routing_skew",
    "guard_latency",
]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One figure behind a finding, beside what it is compared with: `against` says what `expected` is ('plan',
    'measured ceiling', 'most a healthy run has' …)."""

    gauge: str
    value: float
    expected: float | None = None
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A concrete change, with its predicted gain."""

    title: str
    change: Mapping[str, Any] = field(default_factory=dict)  # key of the recipe -> value
    action: str = ""  # what a person does where the change is outside the recipe (a machine, a script's code)
    speedup: float  # predicted: time now over time then, or throughput then over now
    at_most: float | None = None  # largest possible gain where the measurement cannot tell; `speedup` is then the least
    of: str = "step_s"  # the gauge that `speedup` is about
    devices: int = 1  # how many times the devices it takes
    risk: str = "none"  # what it costs or endangers: '+ 0.6 GB', 'outputs differ in the last bits' …
    basis: str = ""  # how it was priced: 'planner', 'Amdahl over the step budget' …

    @property
    def gain_text(self) -> str:
        """'1.31 ×', or '1.00 to 2.40 ×' where only the ends are known"""
        return f"{self.speedup:.2f} ×" if self.at_most is None else f"{self.speedup:.2f} to {self.at_most:.2f} ×"

    @property
    def sets(self) -> str:
        """'--set train.compile=true --set layout.micro_batch=8'"""
        return " ".join(f"--set {override}" for override in overrides_of(self.change))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause that holds a run back."""

    loop: Loop
    cause: Cause
    rule: str  # name of the rule that found it
    says: str  # one plain sentence with the figures in it
    share: float  # of the time (of a step, or of the limiting latency) that would be saved without the cause, 0 to 1
    evidence: tuple[Evidence, ...]
    levers: tuple[Lever, ...] = ()  # best first


Rule = Callable[[Reading, Plan | None], Finding | None]
"""rule(reading, plan) -> a finding, or None"""


def overrides_of(change: Mapping[str, Any]) -> list[str]:
    """As `--set` takes them: 'layout.micro_batch=8'."""
    return [f"{key}={_plain(value)}" for key, value in change.items()]


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def measured(reading: Reading, *gauges: str) -> tuple[Evidence, ...]:
    """Those of the gauges that were measured, as evidence."""
    return tuple(Evidence(gauge=name, value=value) for name in gauges if (value := reading.get(name)) is not None)


def evidence_text(evidence: Evidence) -> str:
    """'data_wait_fraction 23 % (most a healthy run has: 4 %)'."""
    against = (
        f" ({evidence.against}: {value_text(evidence.gauge, evidence.expected)})"
        if evidence.expected is not None
        else ""
    )
    return f"{evidence.gauge} {value_text(evidence.gauge, evidence.value)}{against}"


def value_text(gauge: str, value: float) -> str:
    """A figure as its unit is read: 38 ms, 1.2 GB, 41 %, 12.0 k tokens/s."""
    known = GAUGES.get(RENAMED.get(gauge, gauge))
    unit = known.unit if known is not None else ""
    by_unit: dict[str, Callable[[float], str]] = {
        "s": lambda x: duration_text(x) if x else "0 s",
        "B": bytes_text,
        "fraction": lambda x: f"{100 * x:.3g} %",
        "USD": dollars_text,
    }
    if unit in by_unit:
        return by_unit[unit](value)
    if unit.endswith("/s"):
        return f"{scaled(value)} {unit}" if value >= 1e3 else f"{value:.3g} {unit}"
    if value >= 1e3:
        return count_text(value) if value >= 1e6 else f"{value:,.0f}"
    return f"{value:.4g}"
