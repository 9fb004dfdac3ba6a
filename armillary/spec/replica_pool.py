"""A pool of replicas: what the autoscaler starts and stops, wherever they run.

The processes of fleet/pool/local_pool.py, the pods of cluster/kubernetes/kubernetes_pool.py, and the applications of
cluster/ray/serve_pool.py are pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["starting", "ready", "stopping"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One server."""

    name: str
    url: str
    state: State
    began: float
    """when it was started, in seconds since 1970"""
    ready: float | None = None
    """when it was first ready"""
    release: str = ""
    """what it serves, where it was started with something else than the pool's own"""

    @property
    def start_s(self) -> float | None:
        """How long its start took."""
        return None if self.ready is None else self.ready - self.began


class Pool(Protocol):
    """Starts, stops and lists servers; calls may block."""

    def members(self) -> Sequence[Member]:
        """All servers that run, as they are now; those of an earlier autoscaler are adopted."""

    def start(self, release: str = "") -> Member:
        """Start one more, of another release where one is named."""

    def stop(self, name: str) -> None:
        """Let it finish its requests, then end it."""

    def kill(self, name: str) -> None:
        """End it now."""

    def stop_all(self, grace_s: float) -> None:
        """End every server: let them finish for so long, then kill what is left."""

    def log(self, name: str) -> str:
        """Where to read what a server has printed."""
