"""The life of a pool on Ray Serve, run by test_ray_serve.py with Ray's Python; prints what it saw as JSON.

python serve_pool_life.py ADDRESS FOLDER SERVER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import ray

from armillary.cluster.ray.serve_pool import ServePool

ADDRESS, FOLDER, SERVER = sys.argv[1], Path(sys.argv[2]), sys.argv[3]


def new_pool() -> ServePool:
    def command(release: str) -> list[str]:
        return [sys.executable, SERVER, "0.01", "4"]

    return ServePool(FOLDER, "bot-replica", command, address=ADDRESS, cpus=0.1, drain_s=5.0)


def wait(check: Callable[[], bool], seconds: float = 120.0) -> float:
    begin = time.monotonic()
    while not check():
        if time.monotonic() - begin > seconds:
            raise SystemExit(f"it took too long: {[(each.name, each.state) for each in pool.members()]}")
        time.sleep(0.2)
    return time.monotonic() - begin


def states() -> list[str]:
    return [member.state for member in pool.members()]


def servers() -> list[int]:
    """Processes of the servers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if SERVER.encode() in words and b"armillary.fleet.pool.keeper" not in words and b"--port" in words:
                found.append(int(entry.name))
    return found


pool, saw = new_pool(), {}
first, second = pool.start(), pool.start("registry:bot:2")
assert first.state == "starting"
saw["both_ready_s"] = wait(lambda: states() == ["ready", "ready"])
saw["releases"] = [member.release for member in pool.members()]
saw["answers"] = [urlopen(f"{member.url}/ready").status for member in pool.members()]

pool = new_pool()  # of another process: it adopts
saw["adopted"] = [member.name for member in pool.members()] == [first.name, second.name]

before = pool.members()[0].url
os.kill(servers()[0], 9)  # Serve notices, and runs another
gone = {member.url for member in pool.members()}
saw["replaced_s"] = wait(lambda: states() == ["ready", "ready"] and {member.url for member in pool.members()} != gone)

pool.stop(first.name)
pool.stop(first.name)
saw["drained_s"] = wait(lambda: [member.name for member in pool.members()] == [second.name])
pool.kill(second.name)
saw["killed_s"] = wait(lambda: not pool.members())
saw["left"] = wait(lambda: not servers(), 30.0) >= 0 and len(servers())
print(json.dumps(saw))
ray.shutdown()
