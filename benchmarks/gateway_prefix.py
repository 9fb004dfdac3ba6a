"""How much of their prompts real servers behind a gateway find in their prefix caches, by routing policy.

    python benchmarks/gateway_prefix.py MODEL [--skew 0.08] [--replicas 4] [--requests 1500] [--out FILE.json]

MODEL is a folder of a small model. Traffic: 40 documents, each followed by a question of its own, from 16 clients; all
as often as each other, as in SGLang's generated-shared-prefix, or with `--skew` some far more often. The KV cache of a
server holds a quarter of the documents. Per policy: share of prompt tokens that the servers' own counters report as
found, the busiest server's requests over the mean, and how many times round robin's share that is. No policy finds more
than all, so where round robin finds much (hot prefixes are in every cache), the ratio cannot exceed 1 / its share: the
ceiling, printed beside it. Two figures explain what is left to the ceiling: `first_fraction`, the share of tokens that
come for the first time (each document once, and every question), and `whole_cache_fraction`, what one cache as large as
all servers' together would find of this traffic, so that the rest are documents dropped before they were asked again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gateway import free_port

DOCUMENTS, WORDS, CLIENTS = 40, 150, 16
POLICIES = ("round-robin", "least-load", "power-of-two", "prefix")
DOCUMENTS_PER_SERVER = 10
KV_BYTES_PER_SERVER = 240_000 * DOCUMENTS_PER_SERVER
"""of the tests' tiny model: 256 bytes per token, 880 tokens per document"""


@contextmanager
def running(line: Sequence[str], port: int, log: Path) -> Iterator[int]:
    """A program, once /ready answers 200."""
    with log.open("w") as out:
        child = subprocess.Popen([sys.executable, "-m", "armillary", *line], stdout=out, stderr=out)
    end = time.monotonic() + 300
    try:
        while not is_ready(port):
            assert time.monotonic() < end and child.poll() is None, log.read_text()[-2000:]
            time.sleep(0.2)
        yield port
    finally:
        child.terminate()
        child.wait(60)


def is_ready(port: int) -> bool:
    try:
        return call(port, "GET", "/ready")[0] == 200
    except OSError:
        return False


def call(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def counter(port: int, name: str) -> float:
    found = re.findall(rf"^armillary_{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", call(port, "GET", "/metrics")[1], re.M)
    assert found, f"no armillary_{name} in /metrics"
    return sum(map(float, found))


def prompts(seed: int, count: int, skew: float) -> list[str]:
    """Documents with a question each; the documents are others for each seed, the order in which they come is not."""
    text, order = random.Random(seed), random.Random(0)
    words = [[f"{text.randrange(10**5)}" for _ in range(WORDS)] for _ in range(DOCUMENTS)]
    chosen = [number % DOCUMENTS for number in range(count)]
    order.shuffle(chosen)
    if skew:
        chosen = [min(int(order.expovariate(skew)), DOCUMENTS - 1) for _ in range(count)]
    return [" ".join([*words[each], f"question {text.randrange(10**9)}"]) for each in chosen]


def measure(policy: str, servers: Sequence[int], folder: Path, texts: Sequence[str]) -> dict[str, float]:
    """Send the traffic through a new gateway with this policy."""
    port = free_port()
    line = ["gateway", "--port", str(port), "--policy", policy, "--home", str(folder / policy)]
    line += [word for server in servers for word in ("--upstream", f"bot=http://127.0.0.1:{server}")]
    names = ("prefix_queries_total", "prefix_hits_total", "requests_total")
    with running(line, port, folder / f"{policy}.log"):
        before = {name: [counter(server, name) for server in servers] for name in names}

        def ask(prompt: str) -> int:
            body = {"model": "bot", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            return call(port, "POST", "/v1/completions", json.dumps(body).encode())[0]

        with ThreadPoolExecutor(CLIENTS) as pool:
            statuses = list(pool.map(ask, texts))
    assert set(statuses) == {200}, set(statuses)
    spent = {
        name: [counter(server, name) - old for server, old in zip(servers, before[name], strict=True)] for name in names
    }
    requests = spent["requests_total"]
    return {
        "hit_fraction": sum(spent["prefix_hits_total"]) / sum(spent["prefix_queries_total"]),
        "busiest_over_mean": max(requests) / (sum(requests) / len(servers)),
    }


def bounds(texts: Sequence[str], replicas: int) -> dict[str, float]:
    """Shares of the characters of prompts, nearly those of tokens: that come for the first time, and that one cache of
    the size of all servers' would hold, with the longest unused document dropped first."""
    cache: OrderedDict[str, None] = OrderedDict()
    seen: set[str] = set()
    total = new = held = 0
    for text in texts:
        document = text.partition(" question ")[0]
        total += len(text)
        new += len(text) - (len(document) if document in seen else 0)
        held += len(document) if document in cache else 0
        seen.add(document)
        cache[document] = None
        cache.move_to_end(document)
        while len(cache) > replicas * DOCUMENTS_PER_SERVER:
            cache.popitem(last=False)
    return {"first_fraction": new / total, "whole_cache_fraction": held / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--skew", type=float, default=0.0, help="rate of the exponential that documents are drawn from")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, servers = Path(name), [free_port() for _ in range(asked.replicas)]
        for port in servers:
            line = ["serve", str(asked.model), "--port", str(port), "--home", str(folder / str(port))]
            line += ["--set", f"serve.kv_bytes={KV_BYTES_PER_SERVER}", "--set", "serve.name=bot"]
            stack.enter_context(running(line, port, folder / f"{port}.log"))
        for number, policy in enumerate(POLICIES):
            texts = prompts(100 + number, asked.requests, asked.skew)
            results[policy] = measure(policy, servers, folder, texts)
            results[policy] |= bounds(texts, asked.replicas)
            plain, found = results["round-robin"]["hit_fraction"], results[policy]["hit_fraction"]
            results[policy] |= {"over_round_robin": found / plain, "ceiling": 1 / plain}
            print(policy, *(f"{key} {value:.3f}" for key, value in results[policy].items()), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
