"""What a step costs scheduler and cache, without a model: 256 requests decoding, and prompts of 100,000 tokens.

    python benchmarks/scheduler.py [--running 256] [--steps 600] [--json]

A step is one `schedule` and one `update`; tokens come from nowhere. Times are processor time of the thread, which is
its wall time on a quiet machine. Submitting is timed apart: hashing a prompt happens there, outside the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from statistics import median

from armillary.serving.engine.kv_cache import KVCache
from armillary.serving.engine.kv_groups import WHOLE, Group
from armillary.serving.engine.params import SamplingParams
from armillary.serving.engine.request import Request
from armillary.serving.engine.scheduler import Scheduler
from armillary.serving.engine.settings import Settings

Row = dict[str, float | str]
LONG = 100_000
VOCAB = 150_000
GROUPS = {"all": WHOLE, "window": (Group(), Group(sees="window", reach=1024))}


def make(running: int, num_blocks: int, groups: tuple[Group, ...] = WHOLE) -> Scheduler:
    settings = Settings(max_model_len=131_072, vocab=VOCAB, max_running=running, attention_tokens=20_000.0)
    made = Scheduler(settings, KVCache(num_blocks, 16, groups=groups))
    gc.collect()
    gc.freeze()  # as an engine should: what stays for good need not be looked at by every collection
    return made


def ask(name: str, start: int, length: int, most: int, n: int = 1) -> Request:
    prompt = [(start + 7 * i) % VOCAB for i in range(length)]
    return Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=most, n=n))


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
    return {"case": case, "steps": len(ordered), "median_us": median(ordered) * 1e6, "p99_us": at_99 * 1e6,
            "most_us": ordered[-1] * 1e6, "note": note}  # fmt: skip


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


def decoding(running: int, steps: int, groups: str, *, overlap: bool, queue: int) -> Row:
    """`running` requests of some 500 tokens in decode, `queue` more waiting."""
    scheduler = make(running, 400_000, GROUPS[groups])
    for i in range(running + queue):
        scheduler.submit(ask(f"r{i}", 1000 * i, 480 + i % 64, 20_000), 0.0)
    measured = Steps(scheduler, overlap=overlap)
    measured.while_(lambda: any(seq.num_output < 8 for seq in scheduler.roster.running) or not measured.cost_s)
    measured.for_(steps)
    note = f"layers see {groups}, overlap {'on' if overlap else 'off'}, {queue} waiting"
    return row(f"{running} decoding", measured.cost_s, note)


def long_prompt(running: int) -> list[Row]:
    """A prompt of 100,000 tokens beside decodes: new, found in the cache, answered four times, aborted."""
    scheduler = make(running, 100_000)
    for i in range(running - 6):
        scheduler.submit(ask(f"r{i}", 1000 * i, 64 + i % 16, 4_000), 0.0)
    steps = Steps(scheduler, overlap=True)
    steps.for_(20)
    steps.for_(100)
    rows = [row(f"{running - 6} decoding", steps.cost_s, "what the rows below are beside")]
    for case, start, n in (("new", 5, 1), ("found in the cache", 5, 1), ("four answers", 17, 4)):
        begin = time.thread_time()
        made = scheduler.submit(ask(case, start, LONG, 4, n), 0.0)
        submitted = time.thread_time() - begin
        steps.while_(lambda made=made: any(seq.finish is None for seq in made) or bool(scheduler.cache.leaving))
        rows.append(row(f"prompt of 100k, {case}", steps.cost_s,
                        f"{made[0].cached_tokens:,} cached; submit {submitted * 1e3:.1f} ms"))  # fmt: skip
    (seq,) = scheduler.submit(ask("aborted", 11, LONG, 4), 0.0)
    steps.while_(lambda: seq.computed < LONG - 1)
    begin = time.thread_time()
    scheduler.abort("aborted", 0.0)
    rows.append(row("prompt of 100k, abort", [time.thread_time() - begin], "the call alone"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = (("all", False, 0), ("all", True, 0), ("all", True, 100), ("window", True, 0))
    rows = [decoding(options.running, options.steps, groups, overlap=overlap, queue=queue)
            for groups, overlap, queue in cases]  # fmt: skip
    rows = [plain_loop(options.steps), *rows, *long_prompt(options.running)]
    if options.json:
        print(json.dumps({"python": platform.python_version(), "machine": platform.processor(), "rows": rows}))
        return
    print(f"Python {platform.python_version()}, {options.running} running; µs of one step")
    for found in rows:
        print(f"{found['case']:<34} median {found['median_us']:7.0f}  p99 {found['p99_us']:7.0f}  most "
              f"{found['most_us']:7.0f}   {found['note']}")  # fmt: skip


if __name__ == "__main__":
    main()
