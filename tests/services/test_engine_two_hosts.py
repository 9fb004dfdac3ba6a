"""An engine whose two ranks are on two hosts gives the tokens of one rank, and ends clearly where a host is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from armillary.engine.llm import LLM
from tests.model.quantized.folders import tiny_llama
from tests.services.engine_rank import GREEDY, PROMPTS, TABLE

ADDRESSES = ("10.88.0.1", "10.88.0.2")
HAS_NAMESPACES = shutil.which("ip") is not None and os.geteuid() == 0
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="network namespaces need root and iproute2"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them; nothing else is reached from either."""
    first, second = names = tuple(f"armillary-engine-{os.getpid()}-{number}" for number in range(2))
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", "engine0", "netns", first, "type", "veth", "peer", "name", "engine1", "netns", second)
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"engine{number}")
            for device in ("lo", f"engine{number}"):
                _ip("-n", name, "link", "set", device, "up")
        yield names  # type: ignore[misc]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def start(hosts: tuple[str, str], rank: int, folder: Path, rounds: int, port: int) -> subprocess.Popen[str]:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    place |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": f"engine{rank}", "OMP_NUM_THREADS": 1}
    environment = (
        os.environ | {key: str(value) for key, value in place.items()} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    line = [
        "ip",
        "netns",
        "exec",
        hosts[rank],
        sys.executable,
        "-m",
        "tests.services.engine_rank",
        str(folder),
        str(rounds),
    ]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_hosts_give_the_tokens_of_one(hosts: tuple[str, str], tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "m")
    first, second = (start(hosts, rank, tmp_path / "m", 1, 29_711) for rank in range(2))
    out, _ = first.communicate(timeout=240)
    second.communicate(timeout=60)
    assert second.returncode == first.returncode == 0
    alone = LLM(tmp_path / "m", TABLE, device="cpu").generate(PROMPTS, GREEDY)
    assert json.loads(out) == [made.tokens for made in alone]


def test_a_lost_host_ends_the_engine_with_a_reason(hosts: tuple[str, str], tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "m")
    first, second = (start(hosts, rank, tmp_path / "m", 10_000, 29_712) for rank in range(2))
    assert first.stdout is not None and second.stdout is not None
    pid = int(second.stdout.readline().split()[1])
    assert json.loads(first.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    second.communicate(timeout=60)
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 3 and "ended: " in out.splitlines()[-1]
