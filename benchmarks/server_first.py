"""What HTTP adds to the first text at low load: the engine alone and the server are asked in turns.

    python -m benchmarks.server_first JSON    the engine alone, a block of requests for each line of its input

Two engines are loaded, of which one rests while the other answers: whatever else the machine does meets both, and the
difference of a prompt's two medians is what HTTP adds. The first text counts, which is what a client is sent: a token
that is only part of a character has none, with HTTP as without.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.server_clients import Address, answer, prompts, start_part

_TOKENS = 4
_REST_S = 0.02
"""between two requests"""
_BLOCKS = 10
"""of requests, to each side"""
Times = list[tuple[int, float]]
"""which prompt, seconds to its first text"""


async def firsts(llm: Any, asked: list[list[int]], count: int) -> Times:
    """One request after the other to an engine of this process."""
    from armillary.engine.request.sampling_params import SamplingParams

    found, params = [], SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    for i in range(count):
        begin, first = time.perf_counter(), 0.0
        async for piece in llm.stream(asked[i % len(asked)], params):
            if piece.text or piece.finish:
                first = first or time.perf_counter() - begin
        found.append((i % len(asked), first))
        await asyncio.sleep(_REST_S)
    return found


def added_ms(alone: Times, through: Times) -> list[float]:
    """By prompt."""
    kinds = sorted({kind for kind, _ in alone} & {kind for kind, _ in through})
    return [1e3 * (_median(through, kind) - _median(alone, kind)) for kind in kinds]


def _median(times: Times, kind: int) -> float:
    return statistics.median(seconds for one, seconds in times if one == kind)


def in_turns(folder: str, address: Address, wishes: dict[str, Any]) -> tuple[Times, Times]:
    """Blocks of requests to the engine alone and through HTTP, by turns."""
    block = wishes | {"one": -(-wishes["one"] // _BLOCKS)}
    words = [sys.executable, "-m", "benchmarks.server_first", json.dumps([folder, block])]
    alone, through = [], []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline(), "the engine alone did not start"
        for _ in range(_BLOCKS):
            through += answer(start_part("one", json.dumps([list(address), block])))
            print("next", file=engine.stdin, flush=True)
            alone += json.loads(engine.stdout.readline())
        engine.stdin.close()
    return alone, through


def main() -> None:
    from armillary.engine.llm import LLM
    from armillary.spec.tables.serve import Serve

    folder, wishes = json.loads(sys.argv[1])
    asked = prompts(wishes["streams"], wishes["prompt"])
    with LLM(folder, Serve(**wishes["serve"]), device=wishes["device"], dtype=wishes["dtype"]) as llm:
        asyncio.run(firsts(llm, asked, 2 * len(asked)))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(asyncio.run(firsts(llm, asked, wishes["one"]))), flush=True)


if __name__ == "__main__":
    main()
