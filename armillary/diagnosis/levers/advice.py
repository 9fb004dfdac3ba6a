"""Levers for a trace or a log of another program: there is no recipe to change, so each names torch's API.

Gains follow from Amdahl's law over the recorded budget; where a gain is an upper bound, the basis says so.
"""

from collections.abc import Callable, Iterator
from math import ceil

from armillary.diagnosis.evidence.finding import Cause, Finding, Lever
from armillary.diagnosis.evidence.step_parts import computing, without
from armillary.diagnosis.evidence.thresholds import (
    FUSION_TRAFFIC_RATIO,
    MAX_REMOVABLE_SHARE,
    MAX_WORKERS,
    WORKER_MARGIN,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.profiling.analysis.amdahl import speedup
from armillary.profiling.profile import Profile, Row
from armillary.spec.plan import Plan

AMDAHL = "Amdahl over the recorded budget"
AT_MOST = f"at most: {AMDAHL}"
_PASSES = ("elementwise", "norm", "softmax", "copy")
_Levers = Callable[[Finding, Reading], Iterator[Lever]]


def levers_for(finding: Finding, reading: Reading) -> tuple[Lever, ...]:
    """Against one finding, best first."""
    make = _AGAINST.get(finding.cause)
    return tuple(sorted(make(finding, reading), key=lambda lever: -lever.speedup)) if make else ()


def workers(step_s: float, busy_s: float, now: int = 1, most: int = MAX_WORKERS) -> int:
    """Loader processes that make a batch while a step computes, where `now` of them take a whole step."""
    return min(most, max(2, ceil(WORKER_MARGIN * now * step_s / max(0.05 * step_s, busy_s))))


def max_workers(plan: Plan) -> int:
    """Most loader processes per rank: the ranks of a machine share its cores, where their number is known."""
    cluster, ranks = plan.cluster, plan.layout.num_devices
    if cluster.chip.kind == "cpu":
        cores = cluster.num_devices
    elif cluster.node is not None and cluster.node.cpu_cores:
        cores, ranks = cluster.node.cpu_cores, min(ranks, cluster.node.num_chips)
    else:
        return MAX_WORKERS
    return max(1, min(MAX_WORKERS, cores // ranks))


def read_ahead(finding: Finding, reading: Reading) -> Iterator[Lever]:
    """Enough processes to make a batch while a step computes."""
    yield Lever(
        title="read ahead in loader processes",
        action=f"DataLoader(…, num_workers={workers(1.0, 1 - finding.share)})",
        speedup=without(finding.share),
        basis=AT_MOST,
        risk="a core and a copy of the reader each",
    )


def _launches(finding: Finding, reading: Reading) -> Iterator[Lever]:
    """A graph is launched once: gaps go, short kernels stay."""
    gaps = (reading.get("launch_gap_fraction") or 0.0) + _between(reading)
    on_gpu = bool(reading.profile and reading.profile.kernels)
    action = 'torch.compile(model, mode="reduce-overhead")' if on_gpu else "torch.compile(model)"
    title = "launch the step as CUDA graphs" if on_gpu else "compile: fewer and larger operators"
    yield Lever(
        title=title,
        action=action,
        speedup=without(gaps * computing(reading)),
        basis=AT_MOST,
        risk="time to compile; fixed shapes",
    )


def _between(reading: Reading) -> float:
    """Share in which Python came between two launches, a little each time."""
    return max(0.0, (reading.get("host_fraction") or 0.0) - (reading.get("host_stall_fraction") or 0.0))


def _host(finding: Finding, reading: Reading) -> Iterator[Lever]:
    """By the line where the trace has one."""
    where = reading.settings.get("sync") or reading.settings.get("host") or ""
    at = f" ({where})" if where else ""
    yield Lever(
        title="take the host's work out of the step",
        speedup=without(finding.share),
        basis=AT_MOST,
        action=f"read values later, log less often, move work to a process{at}",
    )


def _fuse(finding: Finding, reading: Reading) -> Iterator[Lever]:
    """Passes over memory joined with their neighbours."""
    if reading.profile is None:
        return
    share = sum(row.seconds for row in _passes(reading.profile)) / max(1e-12, reading.profile.wall_s)
    if share > 0:
        yield Lever(
            title="fuse passes over memory",
            action="torch.compile(model)",
            risk="time to compile",
            speedup=speedup(min(MAX_REMOVABLE_SHARE, share), FUSION_TRAFFIC_RATIO),
            basis=AMDAHL,
        )


def _passes(profile: Profile) -> list[Row]:
    """By their kind where no roofline says that memory holds them up; what a compiler has fused is left out."""
    rows = profile.kernels or tuple(row for row in profile.operators if row.device_s)
    fused = ("triton_", "Memcpy", "Memset")
    return [
        row
        for row in rows
        if row.work in _PASSES and row.bound in ("memory", "unknown") and not row.name.startswith(fused)
    ]


def _overlap(finding: Finding, reading: Reading) -> Iterator[Lever]:
    yield Lever(
        title="hide communication behind computation",
        speedup=without(finding.share),
        basis=AT_MOST,
        action="DDP: larger buckets; FSDP: prefetch; larger micro-batches between exchanges",
    )


_AGAINST: dict[Cause, _Levers] = {
    "data_starvation": read_ahead,
    "launch_overhead": _launches,
    "sync": _host,
    "memory_bandwidth": _fuse,
    "compute": _fuse,
    "exposed_communication": _overlap,
}
