"""A server for many minutes: adapters, drafts, clients that leave and ranks that are killed. Is any token lost or given
twice, and does memory grow?

    python -m benchmarks.engine_soak                              # ten minutes, two ranks, 16 adapters, prompt lookup
    python -m benchmarks.engine_soak --minutes 1 --kill-s 20
    python -m benchmarks.engine_soak --stages 2                   # ranks are stages of layers

Clients stream completions of random weights, greedy and seeded, for the base and for every adapter. One in five leaves
in the middle; all others must get the text that one engine on one rank gives without drafts, however often they have
to ask because a rank was killed. A rank is killed every `--kill-s` seconds; the server starts the engine again.
Memory is that of the server and of its ranks, each rank from when the engine is ready to its end; growth is the slope
from the median of the second quarter of that time to that of its last, in MB per minute. The last line is all figures
as JSON; the exit code is 1 where a token is wrong, a request is left in the engine, or the server's memory grows by
more than `--most-growth`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.lora import adapters
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.train import TrainJob
from armillary.training.step.lora import add_lora, save_adapter
from benchmarks.server_process import Server, make, running

_MODEL = "armillary-2m"
_PROMPTS = 4  # per adapter, greedy and seeded
_LEAVES = 0.2  # share of the clients that close their connection in the middle
_RANK = 4
_LOOK_S = 1.0
_MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request and its text."""

    adapter: str  # empty: the base
    prompt: list[int]
    temperature: float
    seed: int
    tokens: int
    text: str = ""


@dataclass
class Seen:
    """What the clients have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    waits_s: list[float] = field(default_factory=list)

    def note(self, what: str, wrong: str = "") -> None:
        with self.lock:
            self.counts[what] += 1
            self.wrong += [wrong] if wrong else []


def write_adapters(model: Path, folder: Path, count: int) -> None:
    job = TrainJob(lora_rank=_RANK, lora_alpha=2.0 * _RANK)
    base = load_model(model, dtype=torch.float32)
    add_lora(base, job)
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for _, module in adapters(base):
            module.lora_a.data.normal_(0, 0.2, generator=generator)
            module.lora_b.data.normal_(0, 0.2, generator=generator)
        save_adapter(base.state_dict(), base.config, job, folder / f"adapter{number}", base=str(model))


def cases(names: list[str]) -> list[Case]:
    rng, made = random.Random(1), []
    for name in names:
        for number in range(_PROMPTS):
            words = [rng.randrange(1, 8000) for _ in range(rng.randint(4, 16))]
            made.append(
                Case(
                    adapter=name,
                    prompt=(words * 8)[: rng.randint(8, 64)],
                    temperature=0.0 if number % 2 else 0.8,
                    seed=rng.randrange(1 << 30),
                    tokens=rng.randint(8, 96),
                )
            )
    return made


def with_texts(model: Path, folder: Path, asked: list[Case]) -> list[Case]:
    """By one engine on one rank, without drafts, one request at a time."""
    llm = LLM(model, serve_table(folder, len({case.adapter for case in asked})), device="cpu", dtype="fp32")
    made = []
    for case in asked:
        params = SamplingParams(max_tokens=case.tokens, temperature=case.temperature, seed=case.seed, ignore_eos=True)
        text = llm.generate([case.prompt], params, adapter=case.adapter)[0].text
        made.append(Case(**{**vars(case), "text": text}))
    return made


def serve_table(folder: Path, count: int, **more: Any) -> Serve:
    return Serve(
        adapters=str(folder), max_adapters=count, adapter_rank=_RANK, max_running=16, kv_bytes=20_000_000, **more
    )


def ask(server: Server, case: Case, leave_after: int | None) -> Iterator[str]:
    """The pieces of a streamed completion; ConnectionError where it did not come to its end."""
    connection = http.client.HTTPConnection(*server.address, timeout=120)
    body = {
        "model": case.adapter or "model",
        "prompt": case.prompt,
        "max_tokens": case.tokens,
        "temperature": case.temperature,
        "seed": case.seed,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(f"{answer.status} {answer.read()[:200]!r}")
        for number, line in enumerate(answer):
            if leave_after is not None and number >= leave_after:
                return
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                found = json.loads(data)
                if "error" in found:
                    raise ConnectionError(found["error"]["message"])
                yield found["choices"][0]["text"]
        raise ConnectionError("the stream ended without [DONE]")
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()


def client(server: Server, asked: list[Case], seen: Seen, end: float, seed: int) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        case = rng.choice(asked)
        leave_after = rng.randint(1, 30) if rng.random() < _LEAVES else None
        begin = time.monotonic()
        try:
            text = "".join(ask(server, case, leave_after))
        except ConnectionError as error:
            seen.note("refused or broken off")
            print(f"  {str(error)[:120]}", file=sys.stderr)
            time.sleep(0.5)
            continue
        seen.waits_s.append(time.monotonic() - begin)
        right = case.text.startswith(text) if leave_after is not None else text == case.text
        what = "complete" if leave_after is None else "left"
        seen.note(what, "" if right else f"{case} gave {text!r}")


class Memory:
    """Memory of the server and of its ranks, by process."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.samples: dict[int, list[tuple[float, int]]] = {}

    def look(self) -> None:
        for pid in (self.server.process.pid, *(ranks_of(self.server) if self.server.ready() else ())):
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
            self.samples.setdefault(pid, []).append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    def growth(self, pid: int) -> float | None:
        """MB per minute; None for a life that was too short."""
        samples = self.samples[pid]
        quarter = len(samples) // 4
        if quarter < 5:
            return None
        early, late = samples[quarter : 2 * quarter], samples[-quarter:]
        minutes = (median(t for t, _ in late) - median(t for t, _ in early)) / 60
        return (median(size for _, size in late) - median(size for _, size in early)) / _MB / minutes


def ranks_of(server: Server) -> list[int]:
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def soak(server: Server, asked: list[Case], given: argparse.Namespace) -> dict[str, Any]:
    begin, seen, memory, kills = time.monotonic(), Seen(), Memory(server), 0
    end, rng = begin + 60 * given.minutes, random.Random(3)
    threads = [
        threading.Thread(target=client, args=(server, asked, seen, end, number)) for number in range(given.clients)
    ]
    for thread in threads:
        thread.start()
    next_kill = begin + given.kill_s
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        memory.look()
        if time.monotonic() > next_kill and server.ready() and end - time.monotonic() > given.kill_s / 2:
            os.kill(rng.choice(ranks_of(server)[: given.ranks]), signal.SIGKILL)
            kills, next_kill = kills + 1, time.monotonic() + given.kill_s
    for thread in threads:
        thread.join(180)
    server.until_ready(120)
    time.sleep(2)
    growths = {pid: memory.growth(pid) for pid in memory.samples}
    of_server = growths.pop(server.process.pid)
    return {
        "minutes": round((time.monotonic() - begin) / 60, 2),
        "kills": kills,
        "restarts": server.gauge("restarts_total"),
        **{what: seen.counts[what] for what in ("complete", "left", "refused or broken off")},
        "wrong": len(seen.wrong),
        "hung": sum(thread.is_alive() for thread in threads),
        "left in the engine": server.gauge("running") + server.gauge("waiting"),
        "slowest_s": round(max(seen.waits_s, default=0.0), 1),
        "drafted": server.gauge("drafted_total"),
        "accepted": server.gauge("accepted_total"),
        "server_mb": round(memory.samples[server.process.pid][-1][1] / _MB),
        "server_mb_per_minute": round(of_server or 0.0, 2),
        "rank_mb_per_minute": [round(each, 2) for each in growths.values() if each is not None],
        "examples": seen.wrong[:3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-s", type=float, default=90.0)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="of layers, with a step of other requests on each")
    parser.add_argument("--most-growth", type=float, default=2.0, help="MB per minute")
    parser.add_argument("--home", type=Path, help="for records of the server  [default: a temporary folder]")
    given = parser.parse_args()
    with TemporaryDirectory() as work:
        model, folder = Path(work) / "model", Path(work) / "adapters"
        make(model, _MODEL, "cpu")
        write_adapters(model, folder, given.adapters)
        asked = with_texts(model, folder, cases(["", *(f"adapter{number}" for number in range(given.adapters))]))
        table = serve_table(folder, given.adapters)
        keys = ("adapters", "max_adapters", "adapter_rank", "max_running", "kv_bytes")
        serve = {key: getattr(table, key) for key in keys} | {"speculate": "ngram", "pp": given.stages}
        wishes = {
            "serve": serve,
            "device": "cpu",
            "dtype": "fp32",
            "tp": given.ranks // given.stages,
            "home": str(given.home or work),
        }
        exits: list[int] = []
        with running(str(model), wishes, exits) as server:
            figures = soak(server, asked, given)
        figures["exit_codes"] = exits
    for what, value in figures.items():
        print(f"{what:24} {value}")
    print(json.dumps(figures), flush=True)
    bad = figures["wrong"] or figures["hung"] or figures["left in the engine"] or any(exits)
    sys.exit(int(bool(bad or figures["server_mb_per_minute"] > given.most_growth)))


if __name__ == "__main__":
    main()
