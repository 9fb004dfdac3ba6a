"""What HTTP costs: the same requests through `armillary serve` and through the engine alone, and one at a time.

    python -m benchmarks.server FOLDER [--make qwen3-0.6b] [--streams 256] [--tokens 128] [--prompt 128] [--clients 4]

All streams begin at once and stream every token (ignore_eos, greedy). Texts of equal prompts must be equal: a lost or
doubled token shows. `--one` requests one after the other give the added time to the first token at low load. Clients
are processes of their own, so that they do not hold the server up. `--soak SECONDS` repeats the streams and shows the
server's memory. JSON comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = 50
"""different ones, so that texts can be compared"""


def prompts(count: int, length: int, vocab: int = 200) -> list[list[int]]:
    """Token ids that begin differently, over and over."""
    ids = range(vocab - 1)
    kinds = [[1 + ids[(7 * i + 3 * j + i * j) % len(ids)] for j in range(length)] for i in range(PROMPTS)]
    return [kinds[i % PROMPTS] for i in range(count)]


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


# --- in a process of its own: the engine alone


def offline(folder: str, wishes: dict[str, Any]) -> dict[str, Any]:
    """All requests at once without a server, then one at a time through the async stream."""
    from armillary.serving.engine.llm import LLM
    from armillary.serving.engine.params import SamplingParams
    from armillary.spec.service import Serve

    asked, params = prompts(wishes["streams"], wishes["prompt"]), SamplingParams(
        max_tokens=wishes["tokens"], temperature=0.0, ignore_eos=True)  # fmt: skip
    with LLM(folder, Serve(**wishes["serve"]), device=wishes["device"], dtype=wishes["dtype"]) as llm:
        llm.generate(asked[:8], params)
        begin = time.perf_counter()
        found = llm.generate(asked, params)
        seconds = time.perf_counter() - begin
        firsts = asyncio.run(_firsts(llm, asked, params, wishes["one"]))
    made = sum(len(answer.tokens) for answer in found)
    return {"tokens_per_s": made / seconds, "seconds": seconds, "ttft_p50_s": statistics.median(firsts),
            "texts": [answer.text for answer in found[:PROMPTS]]}  # fmt: skip


async def _firsts(llm: Any, asked: list[list[int]], params: Any, count: int) -> list[float]:
    found = []
    for i in range(count):
        begin = time.perf_counter()
        async for _ in llm.stream(asked[i % len(asked)], params):
            found.append(time.perf_counter() - begin)
            break
        await asyncio.sleep(0.02)
    return found


# --- in a process of its own: clients


async def stream(address: tuple[str, int], prompt: list[int], tokens: int, at: float) -> tuple[float, float, bytes]:
    """(seconds to the first token, to the last, all that was sent) of one request."""
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True})
    await asyncio.sleep(max(0.0, at - time.time()))
    begin, first, parts = time.perf_counter(), 0.0, []
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    while data := await reader.read(1 << 16):
        if not first and b"data: " in data:
            first = time.perf_counter() - begin
        parts.append(data)
    writer.close()
    return first, time.perf_counter() - begin, b"".join(parts)


def text_of(sent: bytes) -> str:
    """The text of a stream; raises where it is no whole one."""
    payload = sent.partition(b"\r\n\r\n")[2]
    events = [line[6:] for line in payload.split(b"\n") if line.startswith(b"data: ")]
    assert events and events[-1] == b"[DONE]", sent[-300:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def clients(address: tuple[str, int], wishes: dict[str, Any], part: int) -> dict[str, Any]:
    asked = prompts(wishes["streams"], wishes["prompt"])
    mine = range(part, wishes["streams"], wishes["clients"])
    at = wishes["at"]
    found = await asyncio.gather(*(stream(address, asked[i], wishes["tokens"], at) for i in mine))
    texts = {i % PROMPTS: text_of(sent) for i, (_, _, sent) in zip(mine, found, strict=True)}
    wrong = sum(texts[i % PROMPTS] != text_of(sent) for i, (_, _, sent) in zip(mine, found, strict=True))
    return {"firsts": [first for first, _, _ in found], "lasts": [last for _, last, _ in found], "texts": texts,
            "wrong": wrong, "ended": time.time()}  # fmt: skip


async def one_by_one(address: tuple[str, int], wishes: dict[str, Any]) -> list[float]:
    asked, found = prompts(wishes["streams"], wishes["prompt"]), []
    for i in range(wishes["one"]):
        found.append((await stream(address, asked[i % len(asked)], 4, 0.0))[0])
        await asyncio.sleep(0.02)
    return found


# --- the main process


def part(kind: str, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "benchmarks.server", kind, *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate()
    assert process.returncode == 0, f"a part failed: {process.args}"
    return json.loads(out.splitlines()[-1])


def together(address: tuple[str, int], wishes: dict[str, Any]) -> dict[str, Any]:
    """All streams at once, from several processes that begin at the same time."""
    wishes = wishes | {"at": time.time() + 1.5 + wishes["streams"] / 400}
    parts = [part("clients", json.dumps([list(address), wishes, i])) for i in range(wishes["clients"])]
    found = [answer(process) for process in parts]
    texts: dict[str, set[str]] = {}
    for one in found:
        for key, text in one["texts"].items():
            texts.setdefault(key, set()).add(text)
    seconds = max(one["ended"] for one in found) - wishes["at"]
    wrong = sum(one["wrong"] for one in found) + sum(len(several) - 1 for several in texts.values())
    return {"seconds": max(last for one in found for last in one["lasts"]), "with_clients_s": seconds, "wrong": wrong,
            "texts": [next(iter(texts[str(i)])) for i in range(min(PROMPTS, wishes["streams"]))],
            "ttft_p50_s": statistics.median(first for one in found for first in one["firsts"])}  # fmt: skip


def memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def engine_of(pid: int) -> int:
    """The process that the server has started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def start(folder: str, wishes: dict[str, Any]) -> tuple[subprocess.Popen[bytes], tuple[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word for key, value in wishes["serve"].items() for word in ("--set", f"serve.{key}={json.dumps(value)}")]
    words += ["--device", wishes["device"]] if wishes["device"] else []
    words += ["--dtype", wishes["dtype"]] if wishes["dtype"] else []
    process = subprocess.Popen([sys.executable, "-m", "armillary", "serve", folder, "--port", str(port), *words],
                               stdout=sys.stderr)  # fmt: skip
    for _ in range(1200):
        time.sleep(0.25)
        assert process.poll() is None, "the server ended"
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                sock.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                if b" 200 " in sock.recv(200):
                    return process, ("127.0.0.1", port)
        except OSError:
            continue
    raise AssertionError("the server is never ready")


def measure(folder: str, wishes: dict[str, Any], soak_s: float) -> dict[str, Any]:
    alone = answer(part("offline", json.dumps([folder, wishes])))
    print(f"engine alone: {alone['tokens_per_s']:,.0f} tokens/s, first token {alone['ttft_p50_s'] * 1e3:.2f} ms",
          file=sys.stderr, flush=True)  # fmt: skip
    process, address = start(folder, wishes)
    try:
        together(address, wishes | {"streams": min(8, wishes["streams"])})
        firsts = answer(part("one", json.dumps([list(address), wishes])))
        found = together(address, wishes)
        engine = engine_of(process.pid)
        memory, of_engine = [memory_bytes(process.pid)], [memory_bytes(engine)]
        end = time.time() + soak_s
        while time.time() < end:
            again = together(address, wishes)
            found["wrong"] += again["wrong"]
            memory.append(memory_bytes(process.pid))
            of_engine.append(memory_bytes(engine))
            print(f"soak: {memory[-1] / 1e6:.1f} and {of_engine[-1] / 1e6:.1f} MB, {found['wrong']} wrong",
                  file=sys.stderr, flush=True)  # fmt: skip
    finally:
        process.terminate()
        code = process.wait(60)
    rate = wishes["streams"] * wishes["tokens"] / found["seconds"]
    differ = sum(a != b for a, b in zip(alone["texts"], found["texts"], strict=True))
    return {
        "streams": wishes["streams"], "offline_tokens_per_s": round(alone["tokens_per_s"], 1),
        "http_tokens_per_s": round(rate, 1), "share": round(rate / alone["tokens_per_s"], 4),
        "ttft_alone_ms": round(alone["ttft_p50_s"] * 1e3, 3), "ttft_http_ms": round(statistics.median(firsts) * 1e3, 3),
        "added_ttft_ms": round((statistics.median(firsts) - alone["ttft_p50_s"]) * 1e3, 3),
        "ttft_together_p50_s": round(found["ttft_p50_s"], 4), "wrong": found["wrong"],
        "texts_other_than_offline": differ, "server_bytes": memory[:: max(1, len(memory) // 20)],
        "engine_bytes": of_engine[:: max(1, len(memory) // 20)], "exit": code, "cores": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    if sys.argv[1] in ("offline", "clients", "one"):
        kind, given = sys.argv[1], json.loads(sys.argv[2])
        if kind == "offline":
            print(json.dumps(offline(*given)))
        elif kind == "one":
            print(json.dumps(asyncio.run(one_by_one(tuple(given[0]), given[1]))))
        else:
            print(json.dumps(asyncio.run(clients(tuple(given[0]), given[1], given[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    for name, default in (("streams", 256), ("tokens", 128), ("prompt", 128), ("clients", 4), ("one", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--device")
    parser.add_argument("--make", help="write the folder first: random weights of this shape")
    parser.add_argument("--dtype")
    parser.add_argument("--set", action="append", default=[], help="key=value of [serve]")
    given = vars(parser.parse_args())
    folder, soak_s, shape = given.pop("folder"), given.pop("soak"), given.pop("make")
    if shape:
        make(Path(folder), shape, given["device"] or "cuda")
    given["serve"] = {key: json.loads(value) for key, _, value in (text.partition("=") for text in given.pop("set"))}
    print(json.dumps(measure(folder, given, soak_s)))


if __name__ == "__main__":
    main()
