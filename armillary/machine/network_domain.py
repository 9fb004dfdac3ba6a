"""The domains of the network that this node is in, from the outermost to the innermost, as its scheduler knows them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from armillary.machine.node_id import node_id

NETWORK_DOMAIN = "ARMILLARY_NETWORK_DOMAIN"
"""set for the ranks of a node: zone=a/rack=7"""
DOMAINS_FILE = "ARMILLARY_NETWORK_DOMAINS"
"""a JSON file with that of every node by its id, where a launcher does not know yet which nodes a job gets"""


def network_domain(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What the launcher set, else the launcher's file, else Slurm's switches; empty where nobody knows."""
    env = os.environ if env is None else env
    if NETWORK_DOMAIN in env:
        return parse_domain(env[NETWORK_DOMAIN])
    if env.get(DOMAINS_FILE):
        return parse_domain(_from_file(Path(env[DOMAINS_FILE]), node_id(env)))
    return slurm_domain(env.get("SLURM_TOPOLOGY_ADDR", ""), env.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))


def parse_domain(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("/")))


def slurm_domain(address: str, pattern: str) -> tuple[str, ...]:
    """'s0.s3.tux7', 'switch.switch.node' -> ('switch=s0', 'switch=s3'); a node's name may have dots of its own."""
    kinds = pattern.split(".")
    names = address.split(".", len(kinds) - 1)
    if len(kinds) < 2 or len(names) != len(kinds) or kinds[-1] != "node":
        return ()
    return tuple(f"{kind}={name}" for kind, name in zip(kinds[:-1], names[:-1], strict=True))


def _from_file(path: Path, node: str) -> str:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(known.get(node, "")) if isinstance(known, dict) else ""
