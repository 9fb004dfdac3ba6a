"""The actors of a job on Ray: one per rank, which holds the rank's process, and one that supervises them.

They import this module where they run, so armillary must be installed on every node of the Ray cluster, and the job's
folder must be shared. A supervisor that is lost with its node is started again elsewhere by Ray, and its ranks with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.cluster.job import Job, read_job
from armillary.cluster.node import is_finished, is_interrupted
from armillary.cluster.node_labels import RAY, domain_of
from armillary.machine.cores import compute_threads
from armillary.machine.network_domain import NETWORK_DOMAIN
from armillary.machine.network_route import route_to
from armillary.machine.node_id import NODE_ID
from armillary.spec.network_domains import Domain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json

STATE = "ray_state.json"
POLL_S, MARGIN_S = 0.5, 10.0
OVER = ("finished", "failed", "cancelled")
_PR_SET_PDEATHSIG = 1


class RankActor:
    """One rank: its process ends with the actor, however that ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signalled, self._lock = 0, threading.Lock()

    def facts(self, packed_by: str = "") -> dict[str, Any]:
        """Where it runs: node, address, its GPUs, and a port that nobody listens on."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        context = ray.get_runtime_context()
        gpus = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
        node = context.get_node_id()
        domain = "/".join(node_domains(ray, packed_by).get(node, ()))
        address = ray.util.get_node_ip_address()
        return {"node": node, "address": address, "gpus": gpus, "port": port, "domain": domain}

    def run(self, command: list[str], environment: Mapping[str, str], work: str, log: str) -> int:
        """The exit code of the rank."""
        host = environment["MASTER_ADDR"]
        interface = route_to(host, is_host=environment["RANK"] == "0").interface
        network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        env = {**os.environ, **network, **environment}
        with self._lock:
            if self._signalled:  # before there was a process
                return 128 + self._signalled
            with Path(log).open("ab") as file:
                self._process = subprocess.Popen(
                    command, env=env, cwd=work, stdout=file, stderr=file, preexec_fn=_end_with_parent
                )
        return self._process.wait()

    def signal(self, number: int) -> None:
        with self._lock:
            self._signalled = number
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)


def _end_with_parent() -> None:
    """In the child: the kernel kills it when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """Starts the ranks of a job, starts all of them again when one is lost, and writes down how it is."""

    def __init__(self, folder: str) -> None:
        self._job = read_job(Path(folder))
        self._actors: list[Any] = []
        self._is_cancelled, self._cancelled_at = False, 0.0
        threading.Thread(target=self._work, name="supervisor", daemon=True).start()

    def ping(self) -> bool:
        return True

    def cancel(self) -> None:
        """Ask all ranks to save and end."""
        if not self._is_cancelled:
            self._is_cancelled, self._cancelled_at = True, time.monotonic()
        self._signal()

    def _signal(self) -> None:
        for actor in self._actors:
            actor.signal.remote(int(signal.SIGTERM))

    def _work(self) -> None:
        """Supervise, unless Ray has started this actor again after the job's end; then end the actor, which is detached
        and would stay."""
        try:
            if read_note(self._job).get("state") not in OVER:
                self._supervise()
        finally:
            _end_actor()

    def _supervise(self) -> None:
        command = self._job.rank_command()
        try:
            for start in range(self._job.restarts + 1):
                detail = self._start(start)
                if self._is_cancelled:
                    return self._note("cancelled", detail)
                if is_finished(command) or not (detail or is_interrupted(command)):
                    return self._note("finished")
                detail = detail or "its ranks were asked to end"
            self._note("failed", detail)
        except Exception as error:  # of Ray, or of the shared folder: the user sees it in `launch jobs`
            self._note("failed", f"{type(error).__name__}: {error}")

    def _start(self, start: int) -> str:
        """One start of all ranks: empty where they ended well, else what went wrong."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        self._note("pending", f"waiting for room in the cluster{f' (restart {start})' if start else ''}")
        group = placement_group(bundles(self._job), strategy="SPREAD")
        try:
            while not group.wait(timeout_seconds=POLL_S):
                if self._is_cancelled:
                    return ""
            self._actors = _make_actors(self._job, group)
            facts = ray.get([actor.facts.remote(self._job.launch.pack_within) for actor in self._actors])
            where = ", ".join(dict.fromkeys(each["address"] for each in facts))
            self._note("running", where=where, actors=facts)
            if self._is_cancelled:  # while the actors were made
                self._signal()
            return self._watch(_begin(self._job, self._actors, facts, start))
        except ray.exceptions.RayActorError:
            return "a rank was lost before it began"
        finally:
            for actor in self._actors:
                ray.kill(actor)
            self._actors = []
            remove_placement_group(group)

    def _watch(self, running: dict[Any, int]) -> str:
        """Wait until all ranks have ended, or one has failed; the others are killed then: they hang without it."""
        import ray

        while running:
            done, _ = ray.wait(list(running), timeout=POLL_S)
            for each in done:
                rank = running.pop(each)
                try:
                    code = ray.get(each)
                except ray.exceptions.RayActorError:
                    return f"rank {rank} was lost with its node"
                if code and not self._is_cancelled:
                    return f"rank {rank} ended with {code}"
            if self._is_cancelled and time.monotonic() > self._cancelled_at + self._job.stop_s + MARGIN_S:
                return "ranks had not ended in time"
        return ""

    def _note(self, state: str, detail: str = "", where: str = "", actors: Any = ()) -> None:
        values = {"state": state, "detail": detail, "where": where, "actors": list(actors), "time": time.time()}
        write_json(self._job.folder / STATE, values)


def _end_actor() -> None:
    """End the actor in whose process this is called, from any of its threads; Ray does not start it again."""
    import ray

    ray.kill(ray.get_runtime_context().current_actor)


def node_domains(ray: Any, packed_by: str = "") -> dict[str, Domain]:
    """The domains of the cluster's living nodes by Ray's id of them, from their labels."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return {node["NodeID"]: domain_of(node.get("Labels") or {}, RAY, packed_by) for node in alive}


def bundles(job: Job) -> list[dict[str, float]]:
    """What each node of the job needs of the cluster."""
    cpus = float(job.launch.cpus_per_node or job.ranks_per_node)
    gpus = {"GPU": float(job.gpus_per_node)} if job.gpus_per_node else {}
    return [{"CPU": cpus, **gpus} for _ in range(job.num_nodes)]


def _make_actors(job: Job, group: Any) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    need = bundles(job)[0]
    share = {"num_cpus": need["CPU"] / job.ranks_per_node, "num_gpus": need.get("GPU", 0.0) / job.ranks_per_node}
    actor = ray.remote(RankActor)
    return [
        actor.options(
            **share,
            max_concurrency=2,  # one waits for the process, one signals it
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        ).remote()
        for node in range(job.num_nodes)
        for _ in range(job.ranks_per_node)
    ]


def _begin(job: Job, actors: list[Any], facts: list[dict[str, Any]], start: int) -> dict[Any, int]:
    """Start every rank's process; the future of its exit code -> its rank."""
    command = [job.python or sys.executable, "-m", "armillary", *job.rank_command()]
    running = {}
    for rank, actor in enumerate(actors):
        log = str(job.logs / f"node-{rank // job.ranks_per_node}.log")
        running[actor.run.remote(command, rank_environment(job, rank, facts, start), str(job.work), log)] = rank
    return running


def rank_environment(job: Job, rank: int, facts: list[dict[str, Any]], start: int) -> dict[str, str]:
    """What torchrun would set, the node's id as Ray has it, and the GPUs of all ranks of the node: a rank finds its own
    by its local number."""
    node, local = divmod(rank, job.ranks_per_node)
    on_node = facts[node * job.ranks_per_node : (node + 1) * job.ranks_per_node]
    gpus = [gpu for each in on_node for gpu in each["gpus"]]
    neighbours = sum(each["node"] == facts[rank]["node"] for each in facts)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "MASTER_ADDR": facts[0]["address"],
        "MASTER_PORT": str(facts[0]["port"]),
        "TORCHELASTIC_RESTART_COUNT": str(start),
        NODE_ID: f"{facts[rank]['node']}-{node}",
        NETWORK_DOMAIN: facts[rank].get("domain", ""),
        "OMP_NUM_THREADS": str(compute_threads(neighbours)),
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        **job.launch.environment,
    }


def read_note(job: Job) -> dict[str, Any]:
    """What the supervisor wrote last; empty before it has begun."""
    path = job.folder / STATE
    return nan_safe_json.read_table(path) if path.is_file() else {}
