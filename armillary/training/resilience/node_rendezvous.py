"""Where the nodes of an elastic run meet: torchrun's rendezvous, and what the launchers of a round tell each other.

A round is one membership: it ends when a node is lost or another one waits. All of it is in one store, in the launcher
of the node whose address all nodes name (as with torchrun's c10d rendezvous): a run whose meeting point goes away ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from armillary.errors import ArmillaryError
from armillary.store import nan_safe_json

KEEP_ALIVE_S, KEEP_ALIVES = 2, 4
"""seconds between two signs of life of a node, and how many may be missing: torchrun's 15 s are long for survivors that
wait to go on"""
LAST_CALL_S = 6
"""for more nodes to join once the fewest are there"""
PATIENCE = timedelta(days=30)
"""a node may wait to take part as long as it likes"""
BEAT_S = 1.0
SILENT_S = 12.0
"""without a beat before the launcher of another node counts as lost"""
POLL_S = 0.25
READ_S = 30.0


class RendezvousLost(ArmillaryError):
    """The store that nodes meet in is gone."""


class RendezvousEnded(ArmillaryError):
    """The run has ended, or no longer takes nodes."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How many nodes take part, and where they meet."""

    least: int
    most: int
    host: str = "localhost"
    port: int = 29_400

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"


class NodeRendezvous:
    """This node's part: `join()` a round, `close()` when the run has ended."""

    def __init__(self, nodes: Nodes, run_id: str) -> None:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # ranks meet in the store below, whoever leads
        self.nodes = nodes
        self.store, self.is_host = _open_store(nodes)
        backend = C10dRendezvousBackend(self.store, run_id)
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id,
            self.store,
            backend,
            nodes.least,
            nodes.most,
            local_addr="localhost" if nodes.host == "localhost" else None,
            timeout=RendezvousTimeout(join=PATIENCE, last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=KEEP_ALIVE_S,
            keep_alive_max_attempt=KEEP_ALIVES,
        )

    def join(self) -> Round:
        """Wait until enough nodes are there, and take part with them."""
        with _plain_errors(self.nodes):
            info = self._handler.next_rendezvous()
        return Round(info.store, info.rank, info.world_size)

    def num_waiting(self) -> int:
        """Nodes that wait for the next round."""
        with _plain_errors(self.nodes):
            return self._handler.num_nodes_waiting()

    @property
    def address(self) -> str:
        """Under which other nodes reach this one."""
        return self.nodes.host if self.is_host else socket.getfqdn()

    def note(self, key: str, value: Any) -> None:
        """For nodes of later rounds."""
        with _plain_errors(self.nodes):
            self.store.set(f"armillary/notes/{key}", nan_safe_json.dumps(value))

    def noted(self, key: str) -> Any:
        """None where nothing was."""
        name = f"armillary/notes/{key}"
        with _plain_errors(self.nodes):
            return nan_safe_json.loads(self.store.get(name).decode()) if self.store.check([name]) else None

    def close(self) -> None:
        """No node joins any more."""
        with suppress(ArmillaryError, RendezvousError, RuntimeError), _plain_errors(self.nodes):
            self._handler.shutdown()


def _open_store(nodes: Nodes) -> tuple[TCPStore, bool]:
    """The store at the address: here, where it is this machine's and no other launcher has it already."""
    timeout = timedelta(seconds=READ_S)
    if _matches_machine_hostname(nodes.host):
        with suppress(DistError, RuntimeError):
            opened = TCPStore(nodes.host, nodes.port, is_master=True, wait_for_workers=False, timeout=timeout)
            return opened, True
    end = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < end:
        with suppress(DistError, RuntimeError):
            return TCPStore(nodes.host, nodes.port, is_master=False, timeout=timeout), False
    raise RendezvousLost(f"no node answers at {nodes.where}; start the node of that address first")


@contextmanager
def _plain_errors(nodes: Nodes) -> Iterator[None]:
    try:
        yield
    except RendezvousClosedError as error:
        raise RendezvousEnded(f"the run at {nodes.where} has ended; start it again on all nodes") from error
    except (RendezvousError, DistError) as error:
        raise RendezvousLost(
            f"the launcher at {nodes.where}, where nodes meet, is gone; start all nodes again: the run continues from "
            "its newest checkpoint"
        ) from error


class Round:
    """One membership of nodes: what their launchers tell each other, as JSON by key, and their signs of life."""

    def __init__(self, store: Any, node: int, num_nodes: int) -> None:
        self.node, self.num_nodes = node, num_nodes
        self._store = store
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="node beats", daemon=True)
        self._thread.start()

    @property
    def is_leader(self) -> bool:
        return self.node == 0

    def post(self, key: str, value: Any) -> None:
        with _lost_store():
            self._store.set(key, nan_safe_json.dumps(value))

    def post_first(self, key: str, value: Any) -> bool:
        """Unless another node has posted it already; whether this node was the first."""
        text = nan_safe_json.dumps([self.node, value])
        with _lost_store():
            return bool(self._store.compare_set(f"first/{key}", "", text).decode() == text)

    def read_first(self, key: str) -> Any:
        posted = self.read(f"first/{key}")
        return None if posted is None else posted[1]

    def read(self, key: str) -> Any:
        """What was posted; None where nothing was."""
        with _lost_store():
            return nan_safe_json.loads(self._store.get(key).decode()) if self._store.check([key]) else None

    def wait_for(self, key: str, *, seconds: float = float("inf")) -> Any:
        """What is posted within this time; None where nothing is, or where the leader is lost meanwhile."""
        end = time.monotonic() + seconds
        while (value := self.read(key)) is None and time.monotonic() < end and not self.lost_nodes():
            time.sleep(POLL_S)
        return value if value is not None else self.read(key)

    def gather(self, key: str, value: Any) -> list[Any] | None:
        """What each node tells, in order; None where one is lost meanwhile."""
        self.post(f"{key}/{self.node}", value)
        posted = [self.wait_for(f"{key}/{node}") for node in range(self.num_nodes)]
        return None if None in posted else posted

    def lost_nodes(self) -> list[int]:
        """Nodes without a sign of life. The leader looks at all, the others at the leader."""
        now = time.monotonic()
        watched = [node for node in (range(self.num_nodes) if self.is_leader else (0,)) if node != self.node]
        for node in watched:
            with _lost_store():
                beat = self._store.get(f"beat/{node}") if self._store.check([f"beat/{node}"]) else b""
            if node not in self._heard or self._heard[node][0] != beat:
                self._heard[node] = (beat, now)
        return [node for node in watched if now - self._heard[node][1] > SILENT_S]

    def end(self) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT_S)

    def _beat(self) -> None:
        store, count = self._store.clone(), 0
        while True:
            count += 1
            try:
                store.set(f"beat/{self.node}", str(count))
            except RuntimeError:  # the main thread notices
                return
            if self._ended.wait(BEAT_S):
                return


@contextmanager
def _lost_store() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise RendezvousLost(
            "the launcher where nodes meet is gone; start all nodes again: the run continues from its newest checkpoint"
        ) from error
