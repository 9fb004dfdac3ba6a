"""What a gateway costs: ours, a plain nginx and, where installed, LiteLLM's proxy in front of one instant upstream.

    python benchmarks/gateway.py [--litellm PATH/TO/litellm] [--seconds 10] [--out results.json]

Each gateway runs alone on one core; the load generator and the upstream have the other cores. Per gateway: requests/s
at saturation, CPU time per request, latency at 200 requests/s against the upstream itself, gaps between the chunks of
300 streams, memory. The load generator reports its own lag: how late it sent compared with its schedule. Ours checks a
key and two limits, and routes over two replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop
from gateway_load import GAP_S, at_rate, saturate, streams

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "bot",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
}

# --- the upstream: answers at once, or streams a chunk every 50 ms


class Upstream(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4 : end + 4 + size], self.data[end + 4 + size :]
            self.answer(body)

    def answer(self, body: bytes) -> None:
        if b'"stream":true' in body.replace(b" ", b""):
            self.task = asyncio.ensure_future(self.stream(json.loads(body)["max_tokens"]))
            return
        data = json.dumps(ANSWER).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(data) + data)

    async def stream(self, tokens: int) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = {**ANSWER, "object": "chat.completion.chunk", "usage": None}
        chunk["choices"] = [{"index": 0, "delta": {"content": "tok"}, "finish_reason": None}]
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        begin = time.monotonic()
        for number in range(tokens):
            self.transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(begin + (number + 1) * GAP_S - time.monotonic())
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def run_upstream(port: int) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    uvloop.run(main())


# --- the gateways


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def process(line: list[str], port: int, core: int, log: Path, **environment: str) -> Iterator[psutil.Process]:
    """A program on one core, until it answers on its port and while the block lasts."""
    with log.open("w") as out:
        child = subprocess.Popen(
            ["taskset", "-c", str(core), *line], stdout=out, stderr=out, env=os.environ | environment
        )
    end = time.monotonic() + 120
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end and child.poll() is None, log.read_text()[-2000:]
                time.sleep(0.1)
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(20)


def ours(folder: Path, ports: list[int], core: int, stack: ExitStack) -> tuple[int, str, psutil.Process]:
    from armillary.fleet.gateway.keys import KeyFile

    limits = {"requests": 10**9, "tokens": 10**12}
    _, key = KeyFile(folder / "home" / "gateway" / "keys.json").add("benchmark", limits=limits)
    port = free_port()
    line = [sys.executable, "-m", "armillary", "gateway", "--port", str(port), "--home", str(folder / "home")]
    line += [word for each in ports for word in ("--upstream", f"bot=http://127.0.0.1:{each}")]
    return port, key, stack.enter_context(process(line, port, core, folder / "ours.log"))


NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream replicas {{ {servers} keepalive 512; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{
    proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


def nginx(folder: Path, ports: list[int], core: int, stack: ExitStack) -> tuple[int, str, psutil.Process]:
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{each};" for each in ports)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, servers=servers))
    line = ["nginx", "-c", str(folder / "nginx.conf")]
    return port, "none", stack.enter_context(process(line, port, core, folder / "nginx.log"))


def litellm(
    program: str, folder: Path, ports: list[int], core: int, stack: ExitStack
) -> tuple[int, str, psutil.Process]:
    port, key = free_port(), "sk-benchmark-key-of-sufficient-length-0123456789"
    models = [
        {
            "model_name": "bot",
            "litellm_params": {"model": "openai/bot", "api_base": f"http://127.0.0.1:{each}/v1", "api_key": "x"},
        }
        for each in ports
    ]
    (folder / "litellm.json").write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
    line = [program, "--config", str(folder / "litellm.json"), "--port", str(port), "--host", "127.0.0.1"]
    return port, key, stack.enter_context(process(line, port, core, folder / "litellm.log"))


def measure(port: int, key: str, seconds: float, running: psutil.Process | None) -> dict[str, float]:
    results = uvloop.run(at_rate(port, key, seconds))
    before = _cpu_s(running)
    results |= uvloop.run(saturate(port, key, seconds))
    answered = results["requests_per_s"] * seconds
    results["cpu_us_per_request"] = 1e6 * (_cpu_s(running) - before) / answered if answered else float("nan")
    results |= uvloop.run(streams(port, key, seconds))
    if running is not None:
        results["memory_mb"] = sum(each.memory_info().rss for each in [running, *running.children(True)]) / 1e6
    return results


def _cpu_s(running: psutil.Process | None) -> float:
    if running is None:
        return 0.0
    times = [each.cpu_times() for each in [running, *running.children(True)]]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--litellm", default=shutil.which("litellm") or "")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--upstream-port", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.upstream_port:
        return run_upstream(asked.upstream_port)
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "one core for the gateway and one for the load"
    os.sched_setaffinity(0, cores[1:])
    kinds: dict[str, Callable[..., tuple[int, str, psutil.Process]]] = {"ours": ours}
    if shutil.which("nginx"):
        kinds["nginx"] = nginx
    if asked.litellm:
        kinds["litellm"] = lambda *more: litellm(asked.litellm, *more)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, ports = Path(name), [free_port(), free_port()]
        for port in ports:
            line = [sys.executable, __file__, "--upstream-port", str(port)]
            stack.enter_context(process(line, port, cores[-1], folder / f"upstream-{port}.log"))
        results["direct"] = measure(ports[0], "none", asked.seconds, None)
        show("direct", results["direct"])
        for kind, start in kinds.items():
            with ExitStack() as inner:
                port, key, running = start(folder, ports, cores[0], inner)
                time.sleep(2)
                results[kind] = measure(port, key, asked.seconds, running)
                show(kind, results[kind])
    for kind in results.keys() - {"direct"}:
        added = {each: results[kind][each] - results["direct"][each] for each in ("p50_ms", "p99_ms", "gap_p99_ms")}
        show(f"added by {kind}", added)
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1))
    return None


def show(name: str, values: dict[str, float]) -> None:
    print(f"{name:>18}: " + "  ".join(f"{key} {value:.2f}" for key, value in values.items()), flush=True)


if __name__ == "__main__":
    main()
