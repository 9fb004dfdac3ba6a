"""What a step costs scheduler and cache, without a model: 256 requests decoding, and prompts of 100,000 tokens.

    python benchmarks/scheduler.py [--running 256] [--steps 300] [--repeats 3] [--json]

A step is one `schedule` and one `update`; tokens are made up. Times are CPU time of the thread, which is
its wall time on a quiet machine; every case runs `repeats` times with the same steps, and of each step the least time
counts. Submitting is timed apart: hashing a prompt happens there, outside the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import Settings

Row = dict[str, float | str]
LONG = 100_000
VOCAB = 150_000
GROUPS = {"all": FULL_ATTENTION, "window": (Group(), Group(sees="window", reach=1024))}


def make(running: int, num_blocks: int, groups: tuple[Group, ...] = FULL_ATTENTION) -> Scheduler:
    settings = Settings(
        max_model_len=131_072, vocab=VOCAB, max_running=running, attention_tokens=20_000.0, ageing_s=5.0
    )
    made = Scheduler(settings, KVCache(num_blocks, 16, groups=groups))
    gc.collect()
    gc.freeze()  # as an engine does: what stays for good need not be looked at by every collection
    return made


def ask(name: str, start: int, length: int, most: int, n: int = 1, priority: int = 0) -> Request:
    prompt = [(start + 7 * i) % VOCAB for i in range(length)]
    return Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=most, n=n), priority=priority)


class Steps:
    """Runs steps and keeps what each cost."""

    def __init__(self, scheduler: Scheduler, *, overlap: bool) -> None:
        self.scheduler, self.overlap = scheduler, overlap
        self.cost_s: list[float] = []
        self._token = 2

    def run(self) -> None:
        begin = time.thread_time()
        self.scheduler.schedule(0.0)
        spent = time.thread_time() - begin
        while len(self.scheduler.under_way) > self.overlap:
            decision = self.scheduler.under_way[0]
            self._token = (self._token * 5 + 3) % (VOCAB - 2) + 2
            tokens = [self._token + i & 0xFFFF for i in range(len(decision.sampling))]
            begin = time.thread_time()
            self.scheduler.update(decision, tokens, 0.0)
            spent += time.thread_time() - begin
        self.cost_s.append(spent)

    def for_(self, count: int) -> None:
        self.cost_s = []
        for _ in range(count):
            self.run()

    def while_(self, going: Callable[[], bool]) -> None:
        self.cost_s = []
        while going():
            self.run()


def row(case: str, cost_s: list[float], note: str = "") -> Row:
    ordered = sorted(cost_s)
    at_99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return {
        "case": case,
        "steps": len(ordered),
        "median_us": median(ordered) * 1e6,
        "p99_us": at_99 * 1e6,
        "most_us": ordered[-1] * 1e6,
        "note": note,
    }


def plain_loop(steps: int) -> Row:
    """Five attributes of 256 objects read and written: how quick this machine's Python is just now."""

    class Plain:
        __slots__ = ("a", "b", "c", "d", "tokens")

        def __init__(self) -> None:
            self.a = self.b = self.c = self.d = 0
            self.tokens: list[int] = []

    objects, cost_s = [Plain() for _ in range(256)], []
    for _ in range(steps):
        begin = time.thread_time()
        for one in objects:
            one.a, one.b = one.a + 1, one.b + one.c
            if one.d <= one.a:
                one.tokens.append(one.a)
        cost_s.append(time.thread_time() - begin)
    return row("plain loop over 256 objects", cost_s, "for scale")


class Case(NamedTuple):
    """What 256 requests in decode are like."""

    note: str
    groups: str = "all"
    overlap: bool = True
    queue: int = 0
    """requests that wait beside them"""
    together: bool = False
    """prompts of one length: all need a new block in the same step"""
    priorities: int = 1
    full: bool = False
    """every block was somebody's before and is still named: each new one evicts"""


CASES = (
    Case("without overlap", overlap=False),
    Case("a step ahead"),
    Case("a step ahead, 100 waiting", queue=100),
    Case("a step ahead, three priorities", priorities=3),
    Case("a step ahead, all need a block in the same step", together=True),
    Case("a step ahead, every new block evicts an old one", full=True),
    Case("a step ahead, layers with a window of 1,024 besides", groups="window"),
)


def decoding(running: int, steps: int, case: Case) -> list[list[float]]:
    """`running` requests of some 500 tokens in decode."""
    tables = len(GROUPS[case.groups])
    grown = running * tables * steps // 8
    num_blocks = running * 80 if case.full else (running + case.queue) * 35 * tables + grown
    scheduler = make(running, num_blocks, GROUPS[case.groups])
    measured = Steps(scheduler, overlap=case.overlap)
    most = min(20_000, num_blocks // tables * 16 - 600)  # longer than is measured; one alone must fit the cache
    for i in range(running * 3 if case.full else 0):
        scheduler.submit(ask(f"old{i}", 3000 * i + 1, 480, 1), 0.0)
    measured.while_(lambda: scheduler.has_work)
    for i in range(running + case.queue):
        length = 8 if case.together else 480 + i % 64  # 256 prompts of 8 start in the same step
        scheduler.submit(ask(f"r{i}", 1000 * i, length, most, priority=i % case.priorities), 0.0)
    measured.while_(lambda: any(seq.num_output < 8 for seq in scheduler.request_table.running) or not measured.cost_s)
    measured.for_(steps)
    return [measured.cost_s]


def long_prompts(running: int) -> list[list[float]]:
    """A prompt of 100,000 tokens beside decodes: nothing yet, new, found in the cache, answered four times, aborted."""
    scheduler = make(running, 100_000)
    for i in range(running - 6):
        scheduler.submit(ask(f"r{i}", 1000 * i, 64 + i % 16, 4_000), 0.0)
    steps = Steps(scheduler, overlap=True)
    steps.for_(20)
    steps.for_(100)
    costs, submits = [steps.cost_s], []
    for case, start, n in (("new", 5, 1), ("again", 5, 1), ("four", 17, 4)):
        begin = time.thread_time()
        made = scheduler.submit(ask(case, start, LONG, 4, n), 0.0)
        submits.append(time.thread_time() - begin)
        steps.while_(lambda made=made: any(seq.finish is None for seq in made) or bool(scheduler.cache.freeing))
        costs.append(steps.cost_s)
    (seq,) = scheduler.submit(ask("aborted", 11, LONG, 4), 0.0)
    steps.while_(lambda: seq.computed < LONG - 1)
    begin = time.thread_time()
    scheduler.abort("aborted", 0.0)
    return [*costs, [time.thread_time() - begin], submits]


LONG_NOTES = (
    "nothing else: what the rows below are beside",
    "a prompt of 100k comes",
    "the same comes again and is found",
    "one comes and is answered four times",
    "abort of a prompt of 100k, the call alone",
    "submitting 100k tokens, outside the steps",
)


def least(repeats: int, measure: Callable[[], list[list[float]]]) -> list[list[float]]:
    """The same steps several times: of each step the run that was disturbed least."""
    runs = [measure() for _ in range(repeats)]
    return [[min(costs) for costs in zip(*alike, strict=True)] for alike in zip(*runs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    running, repeats = options.running, options.repeats
    rows = [plain_loop(options.steps)]
    for case in CASES:
        (costs,) = least(repeats, lambda case=case: decoding(running, options.steps, case))
        rows.append(row(f"{running} decoding", costs, case.note))
    long = least(repeats, lambda: long_prompts(running))
    rows += [row(f"{running - 6} decoding", costs, note) for costs, note in zip(long, LONG_NOTES, strict=True)]
    if options.json:
        print(json.dumps({"python": platform.python_version(), "machine": platform.processor(), "rows": rows}))
        return
    print(f"Python {platform.python_version()}, {options.running} running; µs of one step")
    for found in rows:
        print(
            f"{found['case']:<28} median {found['median_us']:7.0f}  p99 {found['p99_us']:7.0f}  most "
            f"{found['most_us']:7.0f}   {found['note']}"
        )


if __name__ == "__main__":
    main()
