"""Identity of the node this process runs on: ranks with the same id are neighbours on one machine.

It is the scheduler's name of the node, else the id of this boot of the kernel. Never the host name: images, containers
and cloned machines often share one.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

NODE_ID = "ARMILLARY_NODE_ID"
"""set by `armillary launch` for the ranks of a node"""


def node_id(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> str:
    """What the launcher set, else Slurm's name of the node inside a step, else the boot id, else a hardware address."""
    env = os.environ if env is None else env
    if env.get(NODE_ID):
        return env[NODE_ID]
    if env.get("SLURM_JOB_ID") and env.get("SLURMD_NODENAME"):
        return env["SLURMD_NODENAME"]
    return _boot_id(root) or f"{uuid.getnode():012x}"


def _boot_id(root: Path) -> str:
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
