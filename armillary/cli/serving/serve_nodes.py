"""serve.nodes: one engine whose ranks are on several nodes."""

from __future__ import annotations

import os
import signal

from armillary.cluster.node import NODE_RANKS
from armillary.errors import BadInput
from armillary.serving.http.server import Say
from armillary.serving.processes.engine_ipc import EngineConfig, NodePlace
from armillary.spec.tables.serve import Serve

_RANKS = (*NODE_RANKS, "GROUP_RANK")
"""as Slurm, Kubernetes and torchrun number nodes"""


def node_place(serve: Serve) -> NodePlace:
    """This node's place, by serve.nodes and what a launcher has set; BadInput where they do not make one."""
    if not serve.nodes:
        return NodePlace()
    count, _, address = serve.nodes.partition("@")
    host, _, port = address.rpartition(":")
    if not (count.isdecimal() and int(count) > 1 and host and port.isdecimal() and 0 < int(port) < 65_536):
        raise BadInput(f"serve.nodes={serve.nodes} is not N@HOST:PORT with two nodes or more; try 2@first-host:29500")
    given = os.environ.get(next((name for name in _RANKS if name in os.environ), ""), "")
    rank = serve.node_rank if serve.node_rank is not None else int(given) if given.isdecimal() else None
    if rank is None or not 0 <= rank < int(count):
        told = "unknown" if rank is None else str(rank)
        raise BadInput(f"the rank of this node among {count} is {told}; set serve.node_rank, from 0 on")
    return NodePlace(count=int(count), rank=rank, host=host.strip("[]"), port=int(port))


def refuse_on_nodes(serve: Serve, place: NodePlace, ranks: int, *, follows: bool) -> None:
    """BadInput for what one engine on several nodes cannot do."""
    if place.count == 1:
        return
    if ranks % place.count:
        parts = "--tp × serve.pp" if serve.dp_attention == 1 else "--tp × serve.dp_attention"
        raise BadInput(f"{ranks} ranks ({parts}) are not a multiple of {place.count} nodes; try other numbers")
    if serve.emulate:
        raise BadInput("serve.emulate needs one process; leave serve.nodes out")
    if serve.role != "combined":
        raise BadInput(f"serve.role={serve.role} is for ranks on one node; leave serve.nodes out")
    if follows:
        raise BadInput("an alias is followed on one node; name a version, or set serve.registry_poll_s=0")


def run_node(config: EngineConfig, ranks: int, say: Say) -> None:
    """On every node but the first: until SIGTERM or SIGINT."""
    from armillary.serving.processes.node_ranks import serve_node

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        serve_node(config, ranks, say)
    except KeyboardInterrupt:
        say("stopped")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
