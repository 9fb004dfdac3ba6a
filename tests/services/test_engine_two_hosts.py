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
import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from tests.engine.disaggregation.test_disaggregation import GREEDY as LONG_GREEDY
from tests.engine.disaggregation.test_disaggregation import MODELS, SERVE
from tests.engine.disaggregation.test_disaggregation import PROMPTS as LONG_PROMPTS
from tests.model.quantized.folders import tiny_llama
from tests.services.engine_rank import GREEDY, PROMPTS, TABLE
from tests.serving.tiny import make_folder

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
    place |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": f"engine{rank}"}
    return run_on(hosts[rank], place, "tests.services.engine_rank", folder, rounds)


def run_on(host: str, place: dict[str, object], module: str, *words: object) -> subprocess.Popen[str]:
    environment = os.environ | {key: str(value) for key, value in place.items()}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    line = ["ip", "netns", "exec", host, sys.executable, "-m", module, *map(str, words)]
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


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_a_prefill_and_a_decode_server_on_two_hosts(
    hosts: tuple[str, str], ranks: tuple[int, int], tmp_path: Path
) -> None:
    folder = save_model(build(MODELS["dense"], dtype=torch.float32, device="cpu", seed=3), tmp_path / "m")
    processes = []
    for host, role, size in zip(hosts, ("prefill", "decode"), ranks, strict=True):
        for rank in range(size):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29_713, "GLOO_SOCKET_IFNAME": "lo"}
            words = (role, folder, f"{ADDRESSES[0]}:29720", tmp_path / "over")
            processes.append(run_on(host, place, "tests.services.role_rank", *words))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    tokens, gauges = json.loads(outputs[ranks[0]])
    assert tokens == [made.tokens for made in LLM(folder, SERVE, device="cpu").generate(LONG_PROMPTS, LONG_GREEDY)]
    assert gauges["kv_fetched_total"] >= 4 and not gauges["kv_fetch_failed_total"]


def test_a_server_on_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    """serve.nodes, with the same command on each; the client is on the first."""
    folder = make_folder(tmp_path)
    flags = (
        "serve",
        folder,
        "--device",
        "cpu",
        "--port",
        8123,
        "--set",
        "serve.dtype=fp32",
        "--set",
        "serve.kv_bytes=20MB",
    )
    flags = (*flags, "--tp", 2, "--set", f"serve.nodes=2@{ADDRESSES[0]}:29730")
    nodes = [
        run_on(host, {"ARMILLARY_HOME": tmp_path / host}, "armillary", *flags, "--set", f"serve.node_rank={rank}")
        for rank, host in enumerate(hosts)
    ]
    try:
        out = nodes[0].stdout
        assert out is not None
        assert any("ready on http" in line for line in iter(out.readline, "")), "it ended"
        body = {"model": "tiny", "prompt": "def main", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        ask = ["curl", "-s", "http://127.0.0.1:8123/v1/completions", "-d", json.dumps(body)]
        answer = subprocess.run(["ip", "netns", "exec", hosts[0], *ask], capture_output=True, text=True, timeout=60)
        text = json.loads(answer.stdout)["choices"][0]["text"]
    finally:
        for node in nodes:
            node.terminate()
            node.communicate(timeout=60)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(folder, TABLE, device="cpu") as alone:
        assert text == alone.generate(["def main"], greedy)[0].text
