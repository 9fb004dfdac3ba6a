"""A tiny model with a tokenizer and a chat template, and a server process of it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from tests.fork_server import Command, shared
from tests.model.layers.test_attention_forms import small

TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools> as <tool_call>{"name": …}</tool_call>
{% endif %}{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
CONTEXT = 2048
TEXT = 'def main():\n    return {"name": "value", "other": [1, 2.5, true, null]}\n# 0123456789 Grüße, naïve 漢字 🙂\n'


def make_folder(path: Path, *, context: int = CONTEXT, **fields: Any) -> Path:
    """A Hugging Face folder of a model that knows nothing; `fields` of its config."""
    tokenizer = train_tokenizer([TEXT] * 20, 320)
    tokenizer.save(path / "tokenizer")
    (path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    config = small(vocab=tokenizer.vocab_size, context=context, **fields)
    model = build(config, dtype=torch.float32, device="cpu", seed=3)
    return save_model(model, path / "tiny", template=path / "tokenizer")


@dataclass
class Server:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str] | Command
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def engine_pids(self) -> list[int]:
        """Its engine's processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def get(self, path: str) -> tuple[int, str]:
        """(status, body) of a path."""
        return self.call("GET", path)[:2]

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """(status, JSON) of what a path says to a body."""
        status, text, _ = self.call("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
        return status, json.loads(text)

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def metric(self, name: str, labels: str = "") -> float:
        """A figure of /metrics."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"armillary_{name}{labels} "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no {name} in /metrics")

    def until(self, what: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait for something; the test fails where it does not come."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"it never came; the server said:\n{self.log.read_text()}"
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False


@contextmanager
def run_server(folder: Path, *flags: str, before: Sequence[str] = (), model: str = "") -> Iterator[Server]:
    """`armillary serve`, as a user starts it, on a free port; gone at the end, however that came about. `before` is
    what the command begins with; `model` is served instead of the folder itself."""
    log = folder.parent / f"server-{time.monotonic_ns()}.out"
    line = ["serve", model or str(folder), "--port", "0", "--device", "cpu", *flags]
    process = _start([*before, sys.executable, "-m", "armillary", *line], log) if before else _fork(line, log)
    server = Server("", process, log)
    try:
        server.until(lambda: "ready on http" in log.read_text(), 90)
        server.url = log.read_text().partition("ready on ")[2].split()[0]
        yield server
    finally:
        process.kill()
        process.wait(30)


def _fork(line: list[str], log: Path) -> Command:
    return shared().start(line, log, cwd=log.parent, err_to_out=True)


def _start(line: list[str], log: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        return subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment, cwd=log.parent)
