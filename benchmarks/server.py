"""What HTTP costs: the same requests through `armillary serve` and through the engine alone, and one at a time.

    python -m benchmarks.server FOLDER [--make qwen3-0.6b] [--streams 256] [--tokens 128] [--prompt 128] [--clients 4]

All streams begin at once and stream every token (ignore_eos, greedy). Texts of equal prompts are compared: in fp32 on a
CPU all are equal, and a lost or doubled token shows; on a GPU in bf16 the likeliest of random weights depends on who is
in the batch, through HTTP as without (`differ`), so with `--make` every token is a word and words are counted
(`wrong_length`). Both sides do the same before they are timed (a round of all prompts with short answers); a round
of HTTP lasts from the moment all begin to the last byte. `--one` requests one after the other give the added time to
the first text at low load (`server_first.py`; on a CPU in turns with the engine alone). `--soak SECONDS` repeats the
streams and shows the memory of both processes every few seconds; `--kill N` ends the engine with kill -9 while N
streams run. JSON comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.server_clients import PROMPTS, answer, brief, prompts, start_part, start_together
from benchmarks.server_first import Times, added_ms, firsts, in_turns
from benchmarks.server_process import Server, make, running

_WARM_TOKENS = 16
_MEMORY_S = 5.0
"""between two looks at the memory"""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- in a process of its own: the engine alone


def offline(folder: str, wishes: dict[str, Any]) -> dict[str, Any]:
    """All requests at once without a server, then one at a time through the async stream."""
    from armillary.engine.llm import LLM
    from armillary.engine.request.sampling_params import SamplingParams
    from armillary.spec.tables.serve import Serve

    def params(tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    asked, seconds = prompts(wishes["streams"], wishes["prompt"]), []
    with LLM(folder, Serve(**wishes["serve"]), device=wishes["device"], dtype=wishes["dtype"]) as llm:
        llm.generate(asked, params(min(_WARM_TOKENS, wishes["tokens"])))
        for _ in range(wishes["rounds"]):
            begin = time.perf_counter()
            found = llm.generate(asked, params(wishes["tokens"]))
            seconds.append(time.perf_counter() - begin)
        alone = asyncio.run(firsts(llm, asked, 0 if wishes["device"] == "cpu" else wishes["one"]))
    assert sum(len(one.tokens) for one in found) == wishes["streams"] * wishes["tokens"]
    answers = [brief(i % PROMPTS, one.text) for i, one in enumerate(found)]
    return {"seconds": seconds, "firsts": alone, "answers": answers}


# --- the main process


def differing(answers: list[Any]) -> int:
    """Answers whose text is not the commonest one of their prompt."""
    by_prompt: dict[int, Counter[str]] = {}
    for prompt, digest, _ in answers:
        by_prompt.setdefault(prompt, Counter())[digest] += 1
    return sum(texts.total() - texts.most_common(1)[0][1] for texts in by_prompt.values())


def together(server: Server, wishes: dict[str, Any]) -> dict[str, Any]:
    """All streams at once, from several processes that begin at the same time."""
    parts, at = start_together(server.address, wishes)
    before = server.cpu_s()
    found = [answer(process) for process in parts]
    cpu = [after - then for after, then in zip(server.cpu_s(), before, strict=True)]
    answers = [answer for one in found for answer in one["answers"]]
    counts = [count for _, _, count in answers]
    ends: Counter[str] = sum((Counter(one["ends"]) for one in found), Counter())
    return {
        "seconds": max(one["ended_at"] for one in found) - at,
        "late_s": max(one["late_s"] for one in found),
        "answers": answers,
        "differ": differing(answers),
        "ends": dict(ends),
        "wrong_length": None if None in counts else sum(count != wishes["tokens"] for count in counts),
        "firsts": [first for one in found for first in one["firsts"]],
        "cpu_s": {"server": cpu[0], "engine": cpu[1], "clients": sum(one["cpu_s"] for one in found)},
        "tokens_an_event": wishes["streams"] * wishes["tokens"] / max(1, sum(one["events"] for one in found)),
    }


def whole(server: Server, wishes: dict[str, Any]) -> dict[str, Any]:
    """A round of which every stream must come to its end."""
    found = together(server, wishes)
    assert found["ends"]["whole"] == wishes["streams"], found["ends"]
    return found


def through_http(server: Server, wishes: dict[str, Any]) -> dict[str, Any]:
    """Timed rounds after one that warms up, and what the engine saw of them."""
    whole(server, wishes | {"tokens": min(_WARM_TOKENS, wishes["tokens"])})
    before = server.sums()
    rounds = [whole(server, wishes) for _ in range(wishes["rounds"])]
    after = server.sums()
    means = {name: (after[name][0] - before[name][0]) / max(1.0, after[name][1] - before[name][1]) for name in after}
    found = sorted(rounds, key=lambda one: one["seconds"])[(len(rounds) - 1) // 2]
    found["differ"] = max(one["differ"] for one in rounds)
    found["engine_ms"] = {name: round(1e3 * means[name], 2) for name in ("queue_s", "prefill_s", "decode_s", "itl_s")}
    return found


def low_load(folder: str, server: Server, wishes: dict[str, Any], alone: Times) -> dict[str, Any]:
    """First texts with nobody else there. A GPU has no room for a second engine: there, `alone` was taken before."""
    if wishes["device"] == "cpu":
        alone, through = in_turns(folder, server.address, wishes)
    else:
        through = answer(start_part("one", json.dumps([list(server.address), wishes])))
    added = added_ms(alone, through)
    medians = [1e3 * statistics.median(seconds for _, seconds in times) for times in (alone, through)]
    tell(f"first text at low load: {medians[0]:.2f} ms, through HTTP {medians[1]:.2f}")
    return {
        "ttft_alone_ms": round(medians[0], 3),
        "ttft_http_ms": round(medians[1], 3),
        "added_ttft_ms": round(statistics.median(added), 3),
        "added_by_prompt_ms": [round(one, 2) for one in added],
    }


def soak(server: Server, wishes: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Rounds until the time is over, with the memory of both processes at equal distances."""
    seen: list[tuple[float, int, int]] = []
    over, begin, rounds, differ = threading.Event(), time.time(), 0, 0

    def watch() -> None:
        while not over.wait(_MEMORY_S):
            seen.append((time.time() - begin, *server.memory()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    while time.time() - begin < seconds:
        found = whole(server, wishes)
        rounds, differ = rounds + 1, differ + found["differ"]
        tell(
            f"soak {time.time() - begin:.0f} s: {' and '.join(f'{size / 1e6:.1f}' for size in server.memory())} MB, "
            f"{rounds * wishes['streams']:,} streams, {differ} other texts"
        )
    over.set()
    watcher.join()
    return {
        "seconds": round(time.time() - begin),
        "rounds": rounds,
        "streams": rounds * wishes["streams"],
        "differ": differ,
        "server": _flat([at for at, _, _ in seen], [size for _, size, _ in seen]),
        "engine": _flat([at for at, _, _ in seen], [size for _, _, size in seen]),
    }


def _flat(times: list[float], sizes: list[int]) -> dict[str, Any]:
    """Memory over time: at its quarters, and what a straight line through the second half gains in ten minutes."""
    half = len(sizes) // 2
    slope = statistics.linear_regression(times[half:], sizes[half:]).slope if len(sizes) - half > 1 else 0.0
    cuts = [i * len(sizes) // 4 for i in range(5)]
    quarters = [statistics.mean(sizes[a:b]) for a, b in pairwise(cuts) if b > a]
    return {
        "samples": len(sizes),
        "quarters_mb": [round(size / 1e6, 2) for size in quarters],
        "most_mb": round(max(sizes, default=0) / 1e6, 2),
        "mb_in_10_min": round(slope * 600 / 1e6, 3),
    }


def killed(server: Server, wishes: dict[str, Any]) -> dict[str, Any]:
    """kill -9 of the engine while streams run: how each of them ended, and how long the service was away."""
    while server.gauge("running"):  # of what went before
        time.sleep(0.1)
    parts, _ = start_together(server.address, wishes)
    deadline = time.time() + 120
    while server.gauge("running") < wishes["streams"]:
        assert time.time() < deadline, "the streams do not run together: give them more tokens"
        time.sleep(0.1)
    os.kill(server.engine, signal.SIGKILL)
    killed_at = time.time()
    while server.ready():
        time.sleep(0.01)
    server.until_ready()
    away_s, found = time.time() - killed_at, [answer(process) for process in parts]
    ends: Counter[str] = sum((Counter(one["ends"]) for one in found), Counter())
    after = whole(server, wishes | {"streams": 20, "tokens": 8})
    told_s = max(one["ended_at"] for one in found) - killed_at
    return {
        "streams": wishes["streams"],
        "ends": dict(ends),
        "all_told_after_s": round(told_s, 2),
        "back_after_s": round(away_s, 2),
        "answers_after": after["ends"]["whole"],
    }


def measure(folder: str, wishes: dict[str, Any], soak_s: float, kill: int) -> dict[str, Any]:
    alone = answer(start_part("offline", json.dumps([folder, wishes]), module="benchmarks.server"))
    tokens = wishes["streams"] * wishes["tokens"]
    offline_rate = tokens / statistics.median(alone["seconds"])
    tell(f"engine alone: {offline_rate:,.0f} tokens/s")
    exits: list[int] = []
    with running(folder, wishes, exits) as server:
        found = through_http(server, wishes)
        rate = tokens / found["seconds"]
        tell(f"through HTTP: {rate:,.0f} tokens/s ({rate / offline_rate:.1%})")
        more = low_load(folder, server, wishes, alone["firsts"]) if wishes["one"] else {}
        more |= {"soak": soak(server, wishes, soak_s)} if soak_s else {}
        more |= {"kill": killed(server, wishes | {"streams": kill, "tokens": wishes["kill_tokens"]})} if kill else {}
    known = {(prompt, digest) for prompt, digest, _ in alone["answers"]}
    other = sum((prompt, digest) not in known for prompt, digest, _ in found["answers"])
    return {
        "streams": wishes["streams"],
        "tokens": wishes["tokens"],
        "offline_tokens_per_s": round(offline_rate, 1),
        "http_tokens_per_s": round(rate, 1),
        "share": round(rate / offline_rate, 4),
        "offline_s": [round(one, 3) for one in alone["seconds"]],
        "http_s": round(found["seconds"], 3),
        "late_s": round(found["late_s"], 3),
        "cpu_s": {who: round(s, 2) for who, s in found["cpu_s"].items()},
        "engine_ms": found["engine_ms"],
        "tokens_an_event": round(found["tokens_an_event"], 2),
        "ttft_together_p50_s": round(statistics.median(found["firsts"]), 4),
        "differ": {"offline": differing(alone["answers"]), "http": found["differ"], "from_offline": other},
        "wrong_length": found["wrong_length"],
        "exit": exits[0],
        "cores": os.cpu_count(),
        **more,
    }


def main() -> None:
    if sys.argv[1] == "offline":
        print(json.dumps(offline(*json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    counts = {
        "streams": 256,
        "tokens": 128,
        "prompt": 128,
        "clients": 4,
        "one": 100,
        "rounds": 1,
        "kill": 0,
        "kill_tokens": 1000,
    }
    for name, default in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--device")
    parser.add_argument("--make", help="write the folder first: random weights of this shape")
    parser.add_argument("--dtype")
    parser.add_argument("--set", action="append", default=[], help="key=value of [serve]")
    given = vars(parser.parse_args())
    folder, soak_s, shape, kill = given.pop("folder"), given.pop("soak"), given.pop("make"), given.pop("kill")
    if shape:
        make(Path(folder), shape, given["device"] or "cuda")
    given["serve"] = {key: json.loads(value) for key, _, value in (text.partition("=") for text in given.pop("set"))}
    print(json.dumps(measure(folder, given, soak_s, kill)))


if __name__ == "__main__":
    main()
