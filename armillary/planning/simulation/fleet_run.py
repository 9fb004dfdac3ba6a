"""What happened in a simulated fleet: its requests, the lives of its replicas, its sizes over time, and decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from armillary.fleet.autoscale.policy import Decision
from armillary.fleet.autoscale.signals import Signals
from armillary.fleet.gateway.routing import Replica
from armillary.planning.simulation.simulated_replica import Served, SimulatedReplica


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one time."""

    now: float
    ready: int
    starting: int
    in_flight: int
    waiting: int
    kv_used: float


@dataclass(kw_only=True)
class Life:
    """One replica from its start to its end."""

    name: str
    engine: SimulatedReplica
    routed: Replica
    began_s: float
    ready_s: float
    ended_s: float = inf
    state: str = "starting"  # starting, ready, draining, failed, stopped
    looked_ttfts: int = 0
    looked_gaps: int = 0
    looked_busy_s: float = 0.0


@dataclass(kw_only=True)
class FleetRun:
    """What happened."""

    served: list[Served] = field(default_factory=list, repr=False)
    refused: int = 0
    """requests that were too long, or found every queue full"""
    broken: int = 0
    """streams that ended with a replica that failed"""
    retried: int = 0
    unserved: int = 0
    """requests that found no replica within fleet.max_wait_s"""
    lives: list[Life] = field(default_factory=list, repr=False)
    timeline: list[Look] = field(default_factory=list, repr=False)
    decisions: list[tuple[Signals, Decision]] = field(default_factory=list, repr=False)
    end_s: float = 0.0

    @property
    def replica_s(self) -> float:
        """Seconds of all replicas, their starts included."""
        return self.replica_s_between(0.0, self.end_s)

    def replica_s_between(self, begin_s: float, end_s: float) -> float:
        """The same within a part of the run."""
        lives = ((max(begin_s, life.began_s), min(end_s, life.ended_s)) for life in self.lives)
        return sum(max(0.0, end - begin) for begin, end in lives)
