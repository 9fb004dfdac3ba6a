"""What a gateway costs: ours, a plain nginx and, where installed, LiteLLM's proxy in front of one instant upstream.

    python benchmarks/gateway.py [--litellm PATH/TO/litellm] [--seconds 10] [--only ours] [--soak 600] [--out FILE.json]

Each gateway runs alone on one core; the load generator and the upstream share the other cores. Per gateway: latency at
200 requests/s, which are sent to the upstream itself too, in between; requests/s at saturation; CPU time per request;
gaps between the chunks of 300 streams; memory with 2,000 open streams. The load generator reports its own lag. Ours
checks a key and two limits, and routes over two replicas. `--soak` adds as many seconds of mixed load on ours, and how
its memory grows. At its end, a table of all beside the targets. The figures of one machine are in gateway.md.
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

import psutil
import uvloop
from gateway_load import Rate, Streams, Target, at_rate, saturate
from gateway_table import table

from armillary.serving.http.connections import raise_file_limit
from armillary.stats import percentile

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
    end = time.monotonic() + 300
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


def ours(folder: Path, ports: list[int], core: int, stack: ExitStack) -> tuple[Target, psutil.Process]:
    from armillary.fleet.gateway.keys import KeyFile

    limits = {"requests": 10**9, "tokens": 10**12}
    _, key = KeyFile(folder / "home" / "gateway" / "keys.json").add("benchmark", limits=limits)
    port = free_port()
    line = [sys.executable, "-m", "armillary", "gateway", "--port", str(port), "--home", str(folder / "home")]
    line += [word for each in ports for word in ("--upstream", f"bot=http://127.0.0.1:{each}")]
    return Target(port, key), stack.enter_context(process(line, port, core, folder / "ours.log"))


NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
worker_rlimit_nofile 20000; events {{ worker_connections 10000; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream replicas {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000; location / {{
    proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


def nginx(folder: Path, ports: list[int], core: int, stack: ExitStack) -> tuple[Target, psutil.Process]:
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{each};" for each in ports)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, servers=servers))
    line = ["nginx", "-c", str(folder / "nginx.conf")]
    return Target(port, "none"), stack.enter_context(process(line, port, core, folder / "nginx.log"))


def litellm(program: str, folder: Path, ports: list[int], core: int, stack: ExitStack) -> tuple[Target, psutil.Process]:
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
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # its list of prices is not fetched
    return Target(port, key), stack.enter_context(process(line, port, core, folder / "litellm.log", **offline))


# --- the measurements


class Usage:
    """CPU time and memory of a program and its children."""

    def __init__(self, program: psutil.Process) -> None:
        self._program = program

    @property
    def _all(self) -> list[psutil.Process]:
        return [self._program, *self._program.children(True)]

    def cpu_s(self) -> float:
        return float(sum(sum(each.cpu_times()[:2]) for each in self._all))

    def memory_mb(self) -> float:
        return float(sum(each.memory_info().rss for each in self._all) / 1e6)


def measure(target: Target, direct: Target, seconds: float, usage: Usage) -> dict[str, float]:
    """Saturation comes first: a gateway that cannot follow 200 requests/s has them in its queue for long after."""
    results = {"idle_memory_mb": usage.memory_mb()}
    uvloop.run(saturate(target, 1.0))  # its connections to the upstream, its caches
    settle(usage)
    before = usage.cpu_s()
    results |= uvloop.run(saturate(target, seconds))
    answered = results["requests_per_s"] * seconds
    results["cpu_us_per_request"] = 1e6 * (usage.cpu_s() - before) / answered if answered else float("nan")
    settle(usage)
    results |= uvloop.run(at_rate(target, direct, seconds))
    settle(usage)
    streams = uvloop.run(Streams(target, 300, 0.05, int(seconds / 0.05)).run())
    results |= {f"300_streams_{name}": value for name, value in streams.items()}
    return results | many_streams(target, usage)


def settle(usage: Usage, most_s: float = 40.0) -> None:
    """Wait until the gateway has nothing left to do."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        before = usage.cpu_s()
        time.sleep(0.5)
        if usage.cpu_s() - before < 0.05:
            return


def many_streams(target: Target, usage: Usage) -> dict[str, float]:
    """Most memory with 2,000 streams of a chunk per second."""
    memory = list[float]()
    streams = Streams(target, 2000, 1.0, 20)
    results = uvloop.run(streams.run(lambda: memory.append(usage.memory_mb())))
    shown = {name: results[name] for name in ("completed", "delay_p99_ms", "generator_lag_p99_ms")}
    return {f"2000_streams_{name}": value for name, value in shown.items()} | {"2000_streams_memory_mb": max(memory)}


async def soak(target: Target, usage: Usage, seconds: float) -> dict[str, float]:
    """100 requests/s and 50 streams all the time; memory every ten seconds, after a minute in which windows fill."""
    memory, begin = list[tuple[float, float]](), time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        rate = Rate(target, 100.0)
        await asyncio.gather(rate.run(time.monotonic(), 10.0), Streams(target, 50, 0.05, 180).run())
        for client in rate.idle:
            client.transport.abort()
        if passed > 60:
            memory.append((passed, usage.memory_mb()))
            print(f"{passed:8.0f} s: {memory[-1][1]:.1f} MB, {rate.summary()['answered']:.0%} answered", flush=True)
    third = max(1, len(memory) // 3)
    first, last = ([size for _, size in part] for part in (memory[:third], memory[-third:]))
    return {"soak_first_mb": percentile(first, 50), "soak_last_mb": percentile(last, 50)}


def programs(chosen: str, litellm_path: str) -> dict[str, Callable[..., tuple[Target, psutil.Process]]]:
    """Those that are installed."""
    found: dict[str, Callable[..., tuple[Target, psutil.Process]]] = {"ours": ours}
    if shutil.which("nginx"):
        found["nginx"] = nginx
    if litellm_path:
        found["litellm"] = lambda *more: litellm(litellm_path, *more)
    return {name: start for name, start in found.items() if chosen in ("", name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", default=shutil.which("litellm") or "")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "one core for the gateway and one for the load"
    os.sched_setaffinity(0, cores[1:])
    raise_file_limit()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, ports = Path(name), [free_port(), free_port()]
        for port in ports:
            line = [sys.executable, str(Path(__file__).with_name("gateway_upstream.py")), str(port)]
            stack.enter_context(process(line, port, cores[-1], folder / f"upstream-{port}.log"))
        direct = Target(ports[0], "none")
        results["direct"] = uvloop.run(Streams(direct, 300, 0.05, int(asked.seconds / 0.05)).run())
        show("300 streams, direct", results["direct"])
        for kind, start in programs(asked.only, asked.litellm).items():
            with ExitStack() as inner:
                target, program = start(folder, ports, cores[0], inner)
                time.sleep(2)
                results[kind] = measure(target, direct, asked.seconds, Usage(program))
                if kind == "ours" and asked.soak:
                    results[kind] |= uvloop.run(soak(target, Usage(program), asked.soak))
            gap_ms = results[kind]["300_streams_gap_p99_ms"] - results["direct"]["gap_p99_ms"]
            results[kind]["300_streams_added_gap_p99_ms"] = gap_ms
            show(kind, results[kind])
    print(table(results), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1))


def show(name: str, values: dict[str, float]) -> None:
    print(f"{name}  (load {os.getloadavg()[0]:.1f})", flush=True)
    for key, value in values.items():
        print(f"    {key:<34} {value:10.2f}", flush=True)


if __name__ == "__main__":
    main()
