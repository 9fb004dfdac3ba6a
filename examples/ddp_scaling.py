"""How well do two ranks scale? Three models, several batch sizes, one pinned thread per rank; predicted, then measured;
and the time to a target accuracy (ddp_accuracy.py).

    python examples/ddp_scaling.py             two minutes on two idle cores; writes ddp_scaling/table.md and plots
    python examples/ddp_scaling.py --quick     two tiny settings, in seconds

docs/exercises/ddp_scaling.md says what to look at; `--page docs/exercises/ddp_scaling.md` puts the result into it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from ddp_accuracy import Reached, Target, accuracy_table
from ddp_rank import SEQUENCE, Setting, Timed, run
from exercise import finish, on_ranks, read_options, table

from armillary.machine.machine import here
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.step_time import StepTime, step_time
from armillary.planning.training.train_case import TrainCase
from armillary.profiling.ceilings.collectives import measure_collectives
from armillary.report.bars import series_bars
from armillary.spec.arithmetic.params import parameters
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.store.peaks import Peaks
from armillary.units import count_text, seconds_text

FULL = [Setting(model=f"armillary-{size}", tokens=tokens) for size in ("2m", "5m", "25m") for tokens in (16, 64, 256)]
QUICK = [Setting(model="armillary-2m", tokens=tokens) for tokens in (16, 32)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting on one rank and on two, and what was expected."""

    setting: Setting
    timed: Timed
    predicted: tuple[StepTime, StepTime]

    @property
    def efficiency(self) -> float:
        """throughput₂ / (2 · throughput₁); each rank has the same tokens, so it is a ratio of step times."""
        return self.timed.one_s / self.timed.step_s

    @property
    def expected(self) -> tuple[float, float]:
        """The plan's efficiency: with the exchange beside the backward pass, and with nothing of it hidden."""
        one, two = self.predicted
        bare = float(one.total[0])
        return bare / float(two.total[0]), bare / (bare + float(two.comm[0]))

    @property
    def communication(self) -> float:
        """Share of the step of two ranks that the exchange adds to it."""
        return max(0.0, 1 - self.timed.alone_s / self.timed.step_s)

    @property
    def crossover(self) -> float:
        """Tokens per rank at which the all-reduce takes as long as the computation."""
        return self.timed.exchange_s / (self.timed.alone_s / self.setting.tokens)

    def tokens_per_s(self, ranks: int) -> float:
        return ranks * self.setting.tokens / (self.timed.one_s if ranks == 1 else self.timed.step_s)


# --- predict


def one_core(quick: bool) -> Peaks:
    """Ceilings of one thread, and what two ranks reach between each other: all the planner needs."""
    torch.set_num_threads(1)
    size, big, tiny = 1024, torch.rand(1 << 24), torch.rand(8)
    matrix = torch.rand(size, size)
    product_s = quickest(lambda: matrix @ matrix)
    copy_s = quickest(lambda: big.clone())
    call_s = quickest(lambda: [tiny.add_(1.0) for _ in range(1000)]) / 1000
    gemm = {"m": size, "n": size, "k": size, "dtype": "fp32", "flops": 2 * size**3 / product_s}
    copy = {"bytes": 2 * big.nbytes, "bytes_per_s": 2 * big.nbytes / copy_s}
    sizes = (1 << 16, 1 << 20) if quick else (1 << 16, 1 << 20, 1 << 24, 1 << 26)
    links = measure_collectives(
        torch.device("cpu"), worlds=(2,), ops=("all_reduce",), sizes=sizes, budget_s=0.1 if quick else 0.5
    )
    return (
        links.peaks.with_points("gemm", [gemm])
        .with_points("copy", [copy])
        .with_points("launch", [{"seconds": call_s, "graph": False}])
    )


def quickest(call: Callable[[], object], times: int = 5) -> float:
    """Seconds of the best of a few calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def predict(setting: Setting, peaks: Peaks, ranks: int) -> StepTime:
    core = here()
    tiers = (replace(core.tiers[0], count=ranks),) if ranks > 1 and core.tiers else ()
    case = TrainCase(
        model=setting.config(),
        cluster=Cluster(name="here", chip=core.chip, tiers=tiers),
        sequence=SEQUENCE,
        batch_tokens=setting.tokens * ranks,
        measured=peaks,
    )
    return step_time(case, as_arrays([Layout(dp=ranks, precision="fp32", micro_batch=setting.tokens // SEQUENCE)]))


# --- measure


def measured(
    settings: list[Setting], target: Target, batch: int, rounds: int, budget_s: float
) -> tuple[list[Timed], list[Reached]]:
    """Every setting on two processes, each with one thread on a core of its own; one of them alone in between."""
    job = {"settings": [vars(one) for one in settings], "target": vars(target), "batch": batch}
    found = on_ranks(__file__, job | {"rounds": rounds, "budget_s": budget_s})
    timed = [Timed(**{field.name: row[field.name] for field in fields(Timed)}) for row in found["rows"]]
    return timed, [Reached(**each) for each in found["reached"]]


def be_a_rank(job: str) -> None:
    wanted = json.loads(job)
    settings = [Setting(**setting) for setting in wanted.pop("settings")]
    found = run(settings, Target(**wanted.pop("target")), **wanted)
    if found is not None:
        print(json.dumps(found))


# --- tell


def scaling_table(rows: Sequence[Row]) -> str:
    heads = ("model", "tokens per rank", "tokens/s on 1", "on 2", "efficiency", "predicted: hidden … bare")
    cells = []
    for row in rows:
        size = count_text(parameters(row.setting.config()).total)
        rates = [f"{row.tokens_per_s(ranks):,.0f}" for ranks in (1, 2)]
        hidden, bare, share = (f"{100 * value:.0f} %" for value in (*row.expected, row.communication))
        efficiency = f"{100 * row.efficiency:.0f} % ± {100 * row.timed.spread:.0f}"
        expected = f"{hidden} … {bare}"
        cells.append(
            (size, str(row.setting.tokens), *rates, efficiency, expected, share, f"{row.crossover:.0f} tokens")
        )
    return table((*heads, "communication", "crossover"), cells)


def verdict(rows: Sequence[Row]) -> list[str]:
    """Two lines a model: where exchange and computing take the same time, from its largest batch, whose step is
    measured best; and from where on two ranks beat one."""
    lines = []
    for name in dict.fromkeys(row.setting.model for row in rows):
        mine = [row for row in rows if row.setting.model == name]
        last = mine[-1]
        gradients = parameters(last.setting.config()).total * 4
        lines.append(
            f"{count_text(gradients // 4)} parameters: {gradients / 1e6:.1f} MB of gradients take "
            f"{seconds_text(last.timed.exchange_s)}, a token {seconds_text(last.timed.alone_s / last.setting.tokens)}: "
            f"crossover at {last.crossover:.0f} tokens per rank; below it a step is mostly exchange"
        )
        lines.append(f"  {worth(mine)}")
    return lines


def worth(rows: Sequence[Row]) -> str:
    """Where efficiency passes 50 %: between the two sizes around it, on a straight line over log tokens."""
    for small, large in pairwise(rows):
        if small.efficiency <= 0.5 < large.efficiency:
            part = (0.5 - small.efficiency) / (large.efficiency - small.efficiency)
            tokens = small.setting.tokens * (large.setting.tokens / small.setting.tokens) ** part
            return f"two ranks are faster than one from about {tokens:.0f} tokens per rank"
    first, last = rows[0], rows[-1]
    if first.efficiency > 0.5:
        return f"two ranks are faster than one at every size measured, from {first.setting.tokens} tokens per rank"
    return f"two ranks are not faster than one up to {last.setting.tokens} tokens per rank"


def bars_of(rows: Sequence[Row], label: str, series: Mapping[str, Callable[[Row], float]]) -> str:
    """A group of bars for each setting, in per cent."""
    groups = [
        (
            f"{count_text(parameters(row.setting.config()).total)} parameters, {row.setting.tokens} tokens per rank",
            [100 * value(row) for value in series.values()],
        )
        for row in rows
    ]
    return series_bars(groups, tuple(series), label=label, text=lambda x: f"{x:.0f} %")


EFFICIENCY: dict[str, Callable[[Row], float]] = {
    "measured": lambda row: row.efficiency,
    "predicted, exchange hidden": lambda row: row.expected[0],
    "predicted, nothing hidden": lambda row: row.expected[1],
}
COMMUNICATION: dict[str, Callable[[Row], float]] = {"exchange of a step": lambda row: row.communication}


def main() -> None:
    if "--rank" in sys.argv:  # this file again, started by on_ranks
        return be_a_rank(sys.argv[-1])
    options = read_options("ddp_scaling", __doc__)
    settings, target, batch = (QUICK, Target(accuracy=0.1), 8) if options.quick else (FULL, Target(accuracy=0.8), 32)
    rounds, budget_s = (3, 0.0) if options.quick else (7, 4.0)
    if len(os.sched_getaffinity(0)) < 2:
        print("only one core: two ranks will share it, so expect an efficiency near 50 % and little else")
    print("predicting: ceilings of one thread, and an all-reduce between two ranks …", flush=True)
    peaks = one_core(options.quick)
    expected = [(predict(setting, peaks, 1), predict(setting, peaks, 2)) for setting in settings]
    for setting, (one, two) in zip(settings, expected, strict=True):
        print(prediction(setting, one, two))
    print("measuring: one rank, both without and both with the exchange, in turns …", flush=True)
    found, reached = measured(settings, target, batch, rounds, budget_s)
    rows = [Row(setting=s, timed=t, predicted=p) for s, t, p in zip(settings, found, expected, strict=True)]
    counted = min(row.timed.rounds for row in rows)
    text = f"Medians of at least {counted} rounds, ± half the quartiles' distance:\n\n{scaling_table(rows)}\n\n"
    text += "\n".join(["```", *verdict(rows), "```"])
    text += f"\n\nA CNN with a batch norm, trained to {target.accuracy:.0%} of unseen digits:\n\n"
    text += accuracy_table(reached, target)
    chart = bars_of(rows, "Efficiency of two ranks", EFFICIENCY)
    exchange = bars_of(rows, "Share of a step that is exchange", COMMUNICATION)
    finish(options, text, chart, "efficiency of two ranks", (exchange, "share of a step that is exchange"))


def prediction(setting: Setting, one: StepTime, two: StepTime) -> str:
    alone_s, comm_s = float(one.total[0]), float(two.comm[0])
    return (
        f"  {setting.model}, {setting.tokens} tokens per rank: step {seconds_text(alone_s)} alone, exchange "
        f"{seconds_text(comm_s)}: efficiency {100 * alone_s / float(two.total[0]):.0f} % if it hides, "
        f"{100 * alone_s / (alone_s + comm_s):.0f} % if not"
    )


if __name__ == "__main__":
    main()
