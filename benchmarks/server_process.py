"""The server under `benchmarks.server`: a process, looked at from outside (memory, CPU time, /metrics)."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

_TICKS = os.sysconf("SC_CLK_TCK")


def make(folder: Path, name: str, device: str) -> None:
    """Random weights of a catalogue shape, with a tokenizer that has text for every one of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from armillary.spec import catalogue
    from benchmarks.engine_start import make as make_weights

    make_weights(folder, name, device)
    vocab = {f"Ġw{i}": i for i in range(catalogue.model(name).config.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "Ġw0"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')


@dataclass(frozen=True, kw_only=True)
class Server:
    """`armillary serve`, running."""

    process: subprocess.Popen[bytes]
    address: tuple[str, int]

    @property
    def engine(self) -> int:
        """The process that the server has started."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def memory(self) -> tuple[int, int]:
        """Bytes in memory of the server and of its engine."""
        return _memory(self.process.pid), _memory(self.engine)

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far of the server and of its engine."""
        return _cpu(self.process.pid), _cpu(self.engine)

    def page(self) -> str:
        with urlopen(f"http://{self.address[0]}:{self.address[1]}/metrics", timeout=10) as page:
            return bytes(page.read()).decode()

    def gauge(self, name: str) -> float:
        found = re.search(rf"^armillary_{name} (\S+)$", self.page(), re.M)
        assert found, f"/metrics has no {name}"
        return float(found[1])

    def sums(self) -> dict[str, tuple[float, float]]:
        """(sum, count) of every histogram on /metrics."""
        samples = re.findall(r"^armillary_(\w+_(?:sum|count)) (\S+)$", self.page(), re.M)
        found = {name: float(value) for name, value in samples}
        names = {name.removesuffix("_sum") for name in found if name.endswith("_sum")}
        return {name: (found[f"{name}_sum"], found[f"{name}_count"]) for name in names}

    def ready(self) -> bool:
        try:
            with socket.create_connection(self.address, 1) as sock:
                sock.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return b" 200 " in sock.recv(200)
        except OSError:
            return False

    def until_ready(self, limit_s: float = 300.0) -> float:
        """Seconds until /ready is 200."""
        begin = time.monotonic()
        while not self.ready():
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() - begin < limit_s, "the server is never ready"
            time.sleep(0.05)
        return time.monotonic() - begin


@contextmanager
def running(folder: str, wishes: dict[str, Any], exits: list[int]) -> Iterator[Server]:
    """A server that is ready; its exit code is added to `exits`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in wishes["serve"].items()}
    words = [word for key, text in texts.items() for word in ("--set", f"serve.{key}={text}")]
    words += ["--device", wishes["device"]] if wishes["device"] else []
    words += ["--set", f"serve.dtype={wishes['dtype']}"] if wishes["dtype"] else []
    words += ["--tp", str(wishes["tp"])] if wishes.get("tp", 1) > 1 else []
    words += ["--home", wishes["home"]] if wishes.get("home") else []
    line = [sys.executable, "-m", "armillary", "serve", folder, "--port", str(address[1]), *words]
    process = subprocess.Popen(line, stdout=sys.stderr)
    try:
        server = Server(process=process, address=address)
        server.until_ready()
        yield server
    finally:
        process.terminate()
        exits.append(process.wait(60))


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS
