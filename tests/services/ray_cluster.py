"""A Ray cluster of two nodes on this machine: a head and a second raylet, each with processes and ports of its own."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
RAY = ROOT / ".venv-ray" / "bin"
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
"""addresses of the nodes; Ray takes 127.0.0.1 for this machine's address in the network"""


@dataclass
class RayCluster:
    """The address of the head, and the processes of each node."""

    address: str
    env: Mapping[str, str]
    folder: Path
    nodes: list[set[int]] = field(default_factory=list)

    def add_node(self, *options: str) -> None:
        """`ray start` returns, and leaves its daemons in the background: they are those that name the folder."""
        before = self._processes()
        command = [str(RAY / "ray"), "start", "--disable-usage-stats", *options]
        done = subprocess.run(command, env=dict(self.env), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        self.nodes.append(self._processes() - before)

    def _processes(self) -> set[int]:
        marked = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self.folder) in " ".join(process.cmdline()):
                    marked.add(process.pid)
        return marked

    def lose_node(self, number: int) -> None:
        """Its raylet is killed: its workers end with it."""
        for pid in self.nodes[number]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running_ray(folder: Path, *, cpus: int = 2) -> Iterator[RayCluster]:
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{RAY}:{os.environ['PATH']}", "RAY_TMPDIR": str(folder)}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of this cluster alone
    cluster = RayCluster(address=f"{HEAD}:{port}", env=env, folder=folder)
    limits = (f"--num-cpus={cpus}", "--object-store-memory=200000000")
    head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
    try:
        cluster.add_node(*head, f"--node-ip-address={HEAD}", *limits)
        cluster.add_node(f"--address={cluster.address}", f"--node-ip-address={SECOND}", *limits)
        _wait_nodes(cluster, 2)
        yield cluster
    finally:
        cluster.stop()


def _wait_nodes(cluster: RayCluster, count: int) -> None:
    end = time.monotonic() + 120
    command = [str(RAY / "ray"), "status", f"--address={cluster.address}"]
    while True:
        said = subprocess.run(command, env=dict(cluster.env), capture_output=True, text=True, timeout=120)
        if len(re.findall(r"^ *\d+ node_", said.stdout, re.MULTILINE)) >= count:
            return
        assert time.monotonic() < end, said.stdout + said.stderr
        time.sleep(1)
