"""Clients of `benchmarks.server`, in processes of their own, so that they do not hold the server up.

    python -m benchmarks.server_clients together|one JSON

They speak HTTP by hand and look at bytes only when all has come: what is measured is the server, not a client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

PROMPTS = 50
"""different ones, so that texts can be compared"""
Address = tuple[str, int]


def prompts(count: int, length: int, vocab: int = 200) -> list[list[int]]:
    """Token ids that begin differently, over and over."""
    ids = range(vocab - 1)
    kinds = [[1 + ids[(7 * i + 3 * j + i * j) % len(ids)] for j in range(length)] for i in range(PROMPTS)]
    return [kinds[i % PROMPTS] for i in range(count)]


def brief(prompt: int, text: str) -> tuple[int, str, int | None]:
    """Which prompt, a text's digest, and how many tokens it is made of where every token is a word `w<id>`."""
    words = text.split()
    counted = len(words) if all(re.fullmatch(r"w\d+", word) for word in words) else None
    return prompt, hashlib.sha256(text.encode()).hexdigest()[:12], counted


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One answer as it came over the wire."""

    first_s: float
    """asked to first event"""
    late_s: float
    """the moment it was to begin, to the one it did"""
    ended_at: float
    """wall-clock time of the last byte"""
    sent: bytes
    """everything the server sent"""

    @property
    def events(self) -> list[bytes]:
        payload = self.sent.partition(b"\r\n\r\n")[2]
        return [line[6:] for line in payload.split(b"\n") if line.startswith(b"data: ")]

    @property
    def text(self) -> str:
        """Raises where it is no whole answer."""
        events = self.events
        assert events and events[-1] == b"[DONE]", self.sent[-300:]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    @property
    def how_ended(self) -> str:
        """whole, error (said so), or cut (the connection broke without a word)."""
        events = self.events
        if events and events[-1] == b"[DONE]":
            return "whole"
        refused = self.sent[9:10] in (b"4", b"5")
        return "error" if refused or (events and b'"error"' in events[-1]) else "cut"


async def stream(address: Address, prompt: list[int], tokens: int, at: float = 0.0) -> Stream:
    """Connect, wait for the moment all begin, ask, and read to the end."""
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    await asyncio.sleep(max(0.0, at - time.time()))
    late, begin, first, parts = time.time() - at if at else 0.0, time.perf_counter(), 0.0, []
    writer.write((head + body).encode())
    try:
        while data := await reader.read(1 << 16):
            if not first and b"data: " in data:
                first = time.perf_counter() - begin
            parts.append(data)
    except ConnectionError:
        pass  # what came before it tells
    writer.close()
    return Stream(first_s=first, late_s=late, ended_at=time.time(), sent=b"".join(parts))


async def together(address: Address, wishes: dict[str, Any], part: int) -> dict[str, Any]:
    """This process's share of the streams: times, how each ended, what was said."""
    asked = prompts(wishes["streams"], wishes["prompt"])
    mine = range(part, wishes["streams"], wishes["clients"])
    found = await asyncio.gather(*(stream(address, asked[i], wishes["tokens"], wishes["at"]) for i in mine))
    cpu_s, ends = time.process_time(), [one.how_ended for one in found]  # what follows is no client's work
    whole = [(i % PROMPTS, one.text) for i, one in zip(mine, found, strict=True) if one.how_ended == "whole"]
    return {
        "firsts": [one.first_s for one in found],
        "late_s": max(one.late_s for one in found),
        "ended_at": max(one.ended_at for one in found),
        "cpu_s": cpu_s,
        "events": sum(len(one.events) - 1 for one in found),
        "answers": [brief(key, text) for key, text in whole],
        "ends": {kind: ends.count(kind) for kind in ("whole", "error", "cut")},
    }


async def one_by_one(address: Address, wishes: dict[str, Any]) -> list[tuple[int, float]]:
    """Which prompt, and the time to its first text with nobody else there."""
    asked, found = prompts(wishes["streams"], wishes["prompt"]), []
    for i in range(wishes["one"]):
        found.append((i % len(asked), (await stream(address, asked[i % len(asked)], 4)).first_s))
        await asyncio.sleep(0.02)
    return found


# --- from the main process


def start_part(*words: str, module: str = "benchmarks.server_clients") -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate()
    assert process.returncode == 0, f"a part failed: {process.args!r}"
    return json.loads(out.splitlines()[-1])


def start_together(address: Address, wishes: dict[str, Any]) -> tuple[list[subprocess.Popen[str]], float]:
    """Processes that all begin at one moment, and that moment."""
    at = time.time() + 1.5 + wishes["streams"] / 400
    given = wishes | {"at": at}
    return [start_part("together", json.dumps([list(address), given, i])) for i in range(wishes["clients"])], at


def main() -> None:
    kind, (address, *given) = sys.argv[1], json.loads(sys.argv[2])
    ask = together if kind == "together" else one_by_one
    print(json.dumps(asyncio.run(ask(tuple(address), *given))))  # type: ignore[operator]


if __name__ == "__main__":
    main()
