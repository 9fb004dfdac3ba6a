"""Amdahl's law by hand and by measurement: one part of a program becomes faster; how much faster is the whole?

    python examples/amdahl.py             a minute; writes amdahl/table.md and plot.svg
    python examples/amdahl.py --quick     one small case of each kind

The share of the part and its own speed-up are measured apart; the law says the rest, and then the whole is measured.
docs/exercises/amdahl.md says what to predict first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median

import torch
from exercise import finish, read_options, table
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions, reference, sdpa
from armillary.model.layers.attention_forms import Attend
from armillary.model.transformer import Transformer, build
from armillary.profiling.analysis.amdahl import speedup
from armillary.profiling.record.profile_callable import profile
from armillary.report.bars import series_bars
from armillary.spec import catalogue
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.training.step.optimizer import make_optimizer, parameter_groups
from armillary.units import seconds_text

VOCAB = 512
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program before and after, the share of the part in it before, and the part alone before and after: seconds of
    each round."""

    name: str
    part: str
    share: float
    before: list[float]
    after: list[float]
    part_before: list[float]
    part_after: list[float]

    @property
    def factor(self) -> float:
        """The part's own speed-up."""
        return median(self.part_before) / median(self.part_after)

    @property
    def by_hand(self) -> float:
        """1 / (1 − p + p/s)"""
        return speedup(self.share, self.factor)

    @property
    def measured(self) -> float:
        return median(self.before) / median(self.after)

    @property
    def measured_range(self) -> tuple[float, float]:
        """The least and the most of any round."""
        ratios = [before / after for before, after in zip(self.before, self.after, strict=True)]
        return min(ratios), max(ratios)


@dataclass
class Stopwatch:
    """Adds up this thread's seconds inside some calls."""

    seconds: float = 0.0

    def around(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(*args: object) -> Tensor:
            begin = time.thread_time()
            result = call(*args)
            self.seconds += time.thread_time() - begin
            return result

        return timed


def in_turns(calls: list[Call], rounds: int, clock: Callable[[], float] = time.thread_time) -> list[list[float]]:
    """Seconds of each in every round; they alternate, so that other load on the machine meets all of them. What runs on
    one thread is timed by that thread's clock, which stands still while others run. The first round is not counted."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, found in zip(calls, seconds, strict=True):
            begin = clock()
            call()
            if number:
                found.append(clock() - begin)
    return seconds


def small(name: str) -> Transformer:
    return build(replace(catalogue.model(name).config, vocab=VOCAB), dtype=torch.float32, device="cpu", seed=0)


# --- attention in a prefill: its share grows with the length


def attends(run: Callable[..., Tensor]) -> Attend:
    return lambda layer, q, k, v, options: run(q, k, v, options)


@torch.no_grad()
def attention_case(model: Transformer, length: int, rounds: int) -> Case:
    """A prefill with the reference's attention, then with torch's fused kernel."""
    tokens, positions = torch.randint(0, VOCAB, (1, length)), torch.arange(length)[None]

    def prefill(run: Callable[..., Tensor]) -> Tensor:
        return model(tokens, positions, attends(run))

    config, watch = model.config, Stopwatch()
    q = torch.randn(1, length, config.heads, config.head_dim)
    k, v = (torch.randn(1, length, config.kv_heads, config.head_dim) for _ in range(2))
    options = AttentionOptions()
    calls: list[Call] = [
        lambda: prefill(reference),
        lambda: prefill(sdpa),
        lambda: reference(q, k, v, options),
        lambda: sdpa(q, k, v, options),
    ]
    before, after, naive, fused = in_turns(calls, rounds)
    begin = time.thread_time()
    for _ in range(rounds):
        prefill(watch.around(reference))
    share = watch.seconds / (time.thread_time() - begin)
    return Case(
        name=f"prefill of {length:,} tokens",
        part="attention: reference → fused",
        share=share,
        before=before,
        after=after,
        part_before=naive,
        part_after=fused,
    )


# --- the optimizer in a training step: its share falls with the batch


def optimizer_case(name: str, tokens: int, rounds: int) -> Case:
    """A training step with AdamW as a loop over the parameters, then with the trainer's own, which is one pass."""
    model = small(name)
    rows = torch.randint(0, VOCAB, (1, tokens + 1))
    positions, job = torch.arange(tokens)[None], TrainJob()
    loop = torch.optim.AdamW(parameter_groups(model, job.weight_decay), lr=0.0, foreach=False, fused=False)
    fused = make_optimizer(model, job)

    def gradients() -> None:
        hidden = model(rows[:, :-1], positions, attends(sdpa))
        torch.nn.functional.cross_entropy(model.head(hidden).flatten(0, 1), rows[:, 1:].flatten()).backward()

    def step(optimizer: torch.optim.Optimizer) -> None:
        model.zero_grad()
        gradients()
        optimizer.step()

    gradients()
    calls: list[Call] = [lambda: step(loop), lambda: step(fused), loop.step, fused.step]
    before, after, loops, one_pass = in_turns(calls, rounds)
    return Case(
        name=f"training step of {tokens:,} tokens",
        part="optimizer: loop → one pass",
        share=min(1.0, median(loops) / median(before)),
        before=before,
        after=after,
        part_before=loops,
        part_after=one_pass,
    )


# --- two threads: all parts become faster, by different factors


@torch.no_grad()
def threads_case(model: Transformer, length: int, rounds: int, home: Home) -> Case:
    """A prefill on one thread, then on two; the part are the GEMMs, whose share the profiler says."""
    tokens, positions = torch.randint(0, VOCAB, (1, length)), torch.arange(length)[None]
    gemms = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.randn(length, gemm.in_features) for gemm in gemms]

    def on(threads: int, call: Call) -> Call:
        def run() -> None:
            torch.set_num_threads(threads)
            call()

        return run

    def prefill() -> Tensor:
        return model(tokens, positions, attends(sdpa))

    def all_gemms() -> None:
        for gemm, x in zip(gemms, inputs, strict=True):
            gemm(x)

    torch.set_num_threads(1)
    seen = profile(prefill, steps=3, warmup=1, home=home, memory=False, stacks=False)
    share = sum(row.seconds for row in seen.operators if row.work == "gemm") / seen.wall_s
    calls = [on(count, call) for call in (prefill, all_gemms) for count in (1, 2)]
    before, after, one, two = in_turns(calls, rounds, time.perf_counter)
    torch.set_num_threads(1)
    return Case(
        name=f"prefill of {length:,} on 2 threads",
        part="GEMMs: 1 → 2 threads",
        share=min(1.0, share),
        before=before,
        after=after,
        part_before=one,
        part_after=two,
    )


def karp_flatt(case: Case, threads: int = 2) -> float:
    """The serial share that would explain the measured speed-up: (1/S − 1/n) / (1 − 1/n) (Karp and Flatt, 1990)."""
    return (1 / case.measured - 1 / threads) / (1 - 1 / threads)


def shown(case: Case) -> Case:
    print(f"{case.name}: {case.by_hand:.2f} × by hand, {case.measured:.2f} × measured", flush=True)
    return case


def main() -> None:
    options = read_options("amdahl", __doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name = "armillary-2m" if options.quick else "armillary-25m"
    lengths, batches, rounds = ((32,), (16,), 3) if options.quick else ((64, 256, 512), (16, 64, 256), 5)
    model = small(name)
    cases = [shown(attention_case(model, length, rounds)) for length in lengths]
    cases += [shown(optimizer_case(name, tokens, rounds)) for tokens in batches]
    with tempfile.TemporaryDirectory() as folder:
        threads = shown(threads_case(model, lengths[len(lengths) // 2], rounds, Home.at(Path(folder))))
    cases.append(threads)
    rows = [
        (
            case.name,
            case.part,
            f"{case.share:.1%}",
            f"{case.factor:.2f} ×",
            f"{case.by_hand:.2f} ×",
            f"{case.measured:.2f} × ({' to '.join(f'{end:.2f}' for end in case.measured_range)})",
            f"{case.by_hand / case.measured - 1:+.0%}",
            f"{speedup(case.share, inf):.2f} ×",
            f"{seconds_text(median(case.before))} → {seconds_text(median(case.after))}",
        )
        for case in cases
    ]
    heads = ("program", "part", "share p", "faster by s", "by hand: 1/(1 − p + p/s)", "measured (rounds)", "error")
    text = f"{name}, one thread unless said otherwise, medians of {rounds}:\n\n" + table(
        (*heads, "at most", "whole program"), rows
    )
    text += "\n\nKarp and Flatt's serial share of the prefill on two threads: "
    text += f"{karp_flatt(threads):.0%}" if threads.measured > 1 else "none, the cores were not free for both"
    bars = [(case.name, [case.factor, case.by_hand, case.measured]) for case in cases]
    series = ("the part alone", "the whole, by hand", "the whole, measured")
    chart = series_bars(bars, series, label="Speed-up of the part and of the whole", text=lambda x: f"{x:.2f} ×")
    finish(options, text, chart, "speed-up of the part, and of the whole by hand and measured")


if __name__ == "__main__":
    main()
