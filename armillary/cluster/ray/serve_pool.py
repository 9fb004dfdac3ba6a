"""A pool on Ray Serve: every replica is an application of one deployment, whose actor runs a server process.

Serve places the actor (on a node with the GPUs that it asks for), checks its health, restarts it, and gives it time to
drain. Requests do not pass Serve's own proxy: the gateway asks each server by its address, so that prefix routing,
health checks and drains are those of the local pool. Applications outlive the process that started them, and the next
pool over the same folder, which has a record of each, adopts them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from armillary.cluster.ray.connection import connect
from armillary.cluster.ray.served_process import ServedProcess
from armillary.errors import missing
from armillary.spec.replica_pool import Member, State
from armillary.store.atomic import write_json

Command = Callable[[str], list[str]]
"""release -> command line of a server, without its address: --host and --port are added"""
_RECORDS = "ray-replicas.json"
_POLL_S, _ASK_S = 0.25, 2.0


class ServePool:
    """Replicas as applications of Ray Serve."""

    def __init__(
        self,
        folder: Path,
        name: str,
        command: Command,
        *,
        address: str = "",
        gpus: int = 0,
        cpus: float = 1.0,
        environment: dict[str, str] | None = None,
        start_s: float = 1800.0,
        drain_s: float = 30.0,
    ) -> None:
        """`folder` has the records and logs, and is shared by the nodes; `gpus` and `cpus` are those of a replica."""
        self._folder, self._name, self._command = folder, name, command
        self._gpus, self._cpus, self._environment = gpus, cpus, environment or {}
        self._start_s, self._drain_s = start_s, drain_s
        folder.mkdir(parents=True, exist_ok=True)
        self._serve = _connected(address)
        self._addresses: dict[str, str] = {}

    def members(self) -> Sequence[Member]:
        records, there = self._records(), self._serve.status().applications
        present = []
        for name, record in list(records.items()):
            status = there[name].status.value if name in there else ""
            if status == "DEPLOY_FAILED":
                self._serve.delete(name, _blocking=False)
            if status in ("", "DEPLOY_FAILED"):
                del records[name]
                continue
            present.append(self._member(name, record, status))
        if records != self._records():
            self._write(records)
        return present

    def start(self, release: str = "") -> Member:
        records = self._records()
        last = max((int(name.rpartition("-")[2]) for name in records), default=0)
        last = max(last, max((int(path.stem.rpartition("-")[2]) for path in self._folder.glob("*.log")), default=0))
        name = f"{self._name}-{last + 1}"
        records[name] = {"began": time.time(), "release": release, "ready": None, "stopping": False}
        Path(self.log(name)).touch()
        self._deploy(name, self._command(release))
        self._write(records)
        return self._member(name, records[name], "DEPLOYING")

    def stop(self, name: str) -> None:
        records = self._records()
        if name in records and not records[name]["stopping"]:
            records[name]["stopping"] = True
            self._write(records)
            self._serve.delete(name, _blocking=False)

    def kill(self, name: str) -> None:
        """Serve shuts an application down in its own time, which a server that hangs would sit out."""
        with suppress(Exception):  # its actor is gone already
            self._serve.get_app_handle(name).kill.remote().result(timeout_s=_ASK_S)
        self.stop(name)

    def stop_all(self, grace_s: float) -> None:
        for member in self.members():
            self.stop(member.name)
        end = time.monotonic() + grace_s
        while self.members() and time.monotonic() < end:
            time.sleep(_POLL_S)

    def log(self, name: str) -> str:
        return str(self._folder / f"{name}.log")

    # --- applications

    def _deploy(self, name: str, command: list[str]) -> None:
        serve = self._serve
        deployment = serve.deployment(
            ServedProcess,
            name="server",
            num_replicas=1,
            ray_actor_options={"num_cpus": self._cpus, "num_gpus": self._gpus},
            health_check_period_s=2,
            health_check_timeout_s=5,
            graceful_shutdown_timeout_s=self._drain_s + 5,
        )
        bound = deployment.bind(command, self._environment, self.log(name), self._start_s, self._drain_s)
        target = serve.RunTarget(target=bound, name=name, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _member(self, name: str, record: dict[str, Any], status: str) -> Member:
        state: State = "stopping" if record["stopping"] or status == "DELETING" else "starting"
        url = self._address_of(name) if status == "RUNNING" and state == "starting" else ""
        if url:
            state = "ready"
            if record["ready"] is None:
                record["ready"] = time.time()
        return Member(
            name=name,
            url=url or self._addresses.get(name, ""),
            state=state,
            began=record["began"],
            ready=record["ready"] if state != "starting" else None,
            release=record["release"],
        )

    def _address_of(self, name: str) -> str:
        """Asked each time: Serve restarts a replica elsewhere."""
        try:
            address = str(self._serve.get_app_handle(name).address.remote().result(timeout_s=_ASK_S))
        except Exception:  # Serve's own errors of a replica that has just gone are of many types
            return ""
        self._addresses[name] = address
        return address

    def _records(self) -> dict[str, dict[str, Any]]:
        path = self._folder / _RECORDS
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _write(self, records: dict[str, dict[str, Any]]) -> None:
        write_json(self._folder / _RECORDS, records)


def _connected(address: str) -> Any:
    connect(address)
    try:
        from ray import serve
    except ImportError:
        raise missing("ray[serve]", 'fleet.pool = "ray"', "ray") from None
    serve.start(http_options={"location": "NoServer"})
    return serve
