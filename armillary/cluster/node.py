"""The start of a job on one node: `python -m armillary.cluster.node … -- train RECIPE …`, the same on every target.

It finds out which node this is and which network leads to the others, and runs torchrun. A job whose run is finished
already, as when a scheduler starts it once more, ends at once. It is the entry point of containers: it answers probes,
and SIGTERM at any moment, also as the first process of a pod, which Linux does not end by default.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from armillary.cluster.job import INTERRUPTED
from armillary.cluster.node_health import serve_health
from armillary.errors import ArmillaryError, BadInput, NotFound, missing
from armillary.machine.cores import compute_threads
from armillary.machine.network_route import Route, route_to
from armillary.machine.node_id import NODE_ID, node_id
from armillary.store.home import Home
from armillary.store.runs import Run, find_run

NODE_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""variables in which Slurm and Kubernetes number the nodes of a job"""
USER_ERROR = 2
_RESOLVE_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class NodeStart:
    """What a node is told: `rendezvous` is HOST:PORT on the first node, `stop_s` how long ranks may take to end when
    asked to, `health_port` where probes are answered (0: nowhere), `resolve_s` how long the first node's name may stay
    unknown, and `command` what each rank runs; in an elastic run, with `least` nodes or more, what each node runs."""

    nodes: int
    ranks: int
    node_rank: int
    rendezvous: str
    id: str
    restarts: int = 0
    stop_s: float = 30.0
    interface: str = ""
    node_id: str = ""
    health_port: int = 0
    resolve_s: float = 0.0
    least: int = 0  # nodes with which an elastic run goes on
    command: tuple[str, ...]

    @property
    def host(self) -> str:
        return self.rendezvous.rpartition(":")[0].strip("[]")

    @property
    def is_host(self) -> bool:
        """Whether ranks meet on this node."""
        return self.node_rank == 0


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _leave)  # until torchrun takes it over
    try:
        start = read_arguments(arguments, os.environ)
        if is_finished(start.command):
            print(f"run {_option(start.command, '--run')} is finished: nothing to do", flush=True)
            return 0
        if start.health_port:
            serve_health(start.health_port, start.ranks)
        route = find_route(start)
        os.environ |= environment(start, route, os.environ)
        arguments = [] if start.least else torchrun_arguments(start, route)
    except ArmillaryError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    print(f"node {start.node_rank} of {start.nodes} is {os.environ[NODE_ID]}, {route.address} on {route.interface}")
    sys.stdout.flush()
    code = run_elastic(start) if start.least else run_torchrun(arguments)
    return code or (INTERRUPTED if is_interrupted(start.command) else 0)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def find_route(start: NodeStart) -> Route:
    """The route to the first node, whose name may not be known yet."""
    end = time.monotonic() + start.resolve_s
    while True:
        try:
            return route_to(start.host, interface=start.interface, is_host=start.is_host)
        except NotFound:
            if time.monotonic() >= end:
                raise
            time.sleep(_RESOLVE_EVERY_S)


def run_elastic(start: NodeStart) -> int:
    """`armillary train --nodes`, whose nodes come and go; it gets the signals that come here."""
    nodes = f"{start.least}:{start.nodes}@{start.rendezvous}"
    process = subprocess.Popen([sys.executable, "-m", "armillary", *start.command, "--nodes", nodes])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


def run_torchrun(arguments: list[str]) -> int:
    """torchrun in this process; its exit code, in place of tracebacks of what its ranks have reported already."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except SignalException as stopped:
        print(f"stopped by signal {stopped.sigval.value}", flush=True)
        return 128 + int(stopped.sigval.value)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        print(f"error: rank {rank} ended with exit code {failure.exitcode}; see what it said above", file=sys.stderr)
        return 1
    return 0


_NUMBERS = (
    ("nodes", int),
    ("ranks", int),
    ("restarts", int),
    ("stop-s", float),
    ("health-port", int),
    ("resolve-s", float),
    ("least", int),
)


def read_arguments(arguments: Sequence[str], env: Mapping[str, str]) -> NodeStart:
    parser = argparse.ArgumentParser(prog="python -m armillary.cluster.node")
    for name, kind in _NUMBERS:
        parser.add_argument(f"--{name}", type=kind, default=0)
    for name in ("rendezvous", "id"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("node-rank", "node-id", "interface"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("command", nargs="+")
    options = vars(parser.parse_args(arguments))
    return NodeStart(**{**options, "node_rank": _node_rank(options, env), "command": tuple(options["command"])})


def _node_rank(options: Mapping[str, str | int], env: Mapping[str, str]) -> int:
    given = str(options["node_rank"]) or next((env[name] for name in NODE_RANKS if name in env), "")
    if not given and options["nodes"] == 1:
        return 0
    if not given.isdecimal() or int(given) >= int(options["nodes"]):
        raise BadInput(f"node rank '{given}' is none of {options['nodes']} nodes; give --node-rank")
    return int(given)


def is_finished(command: Sequence[str]) -> bool:
    """Whether the run that the command names has done all its steps."""
    run = _run(command)
    return run is not None and run.state.state == "finished" and run.state.step >= _steps(command)


def is_interrupted(command: Sequence[str]) -> bool:
    """Whether the ranks of the run saved and ended before they were done; nodes end together, so that is written."""
    run = _run(command)
    return run is not None and run.state.state == "interrupted"


def _run(command: Sequence[str]) -> Run | None:
    """The run that the command names, once it has begun."""
    name, home = _option(command, "--run"), _option(command, "--home")
    try:
        return find_run(Home.at(home) if home else Home.default(), name) if name else None
    except NotFound:
        return None


def _steps(command: Sequence[str]) -> int:
    from armillary.spec.recipe import load_recipe

    return load_recipe(command[1]).train.steps


def _option(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1] if name in command else ""


def environment(start: NodeStart, route: Route, env: Mapping[str, str]) -> dict[str, str]:
    """What ranks find in their environment: their node, the interface of gloo and NCCL, and threads per rank; what a
    user has set stays."""
    values = {NODE_ID: start.node_id or node_id(env), "OMP_NUM_THREADS": str(compute_threads(start.ranks))}
    if route.interface:
        values |= {"GLOO_SOCKET_IFNAME": route.interface, "TP_SOCKET_IFNAME": route.interface}
        values |= {} if route.is_loopback else {"NCCL_SOCKET_IFNAME": route.interface}
    return {name: value for name, value in values.items() if name not in env or name == NODE_ID}


def torchrun_arguments(start: NodeStart, route: Route) -> list[str]:
    """What torchrun is told; ranks of all nodes meet in a store on the first."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise missing("torch", "training", "torch")
    options = {
        "nnodes": start.nodes,
        "nproc-per-node": start.ranks,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": start.rendezvous,
        "rdzv-conf": f"is_host={int(start.is_host)}",
        "rdzv-id": start.id,
        "local-addr": route.address,
        "max-restarts": start.restarts,
    }
    if "--shutdown-timeout" in (Path(spec.origin).parent / "distributed/run.py").read_text():  # not in torch 2.11
        options["shutdown-timeout"] = int(start.stop_s)
    else:
        print(f"this torch ends ranks after its own shutdown timeout, not {start.stop_s:g} s; a newer one takes it")
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [*flags, "-m", "--", "armillary", *start.command]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
