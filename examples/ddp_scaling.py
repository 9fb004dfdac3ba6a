"""How well do two ranks scale? Three models, several batch sizes, one pinned thread per rank; predicted, then measured.

    python examples/ddp_scaling.py             two minutes on two idle cores; writes ddp_scaling/table.md and .png
    python examples/ddp_scaling.py --quick     two tiny settings, in seconds

docs/exercises/ddp_scaling.md says what to look at; `--page docs/exercises/ddp_scaling.md` puts the result into it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from ddp_rank import SEQUENCE, Setting, Timed, run
from exercise import on_ranks

from armillary.machine.machine import here, machine
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.step_time import StepTime, step_time
from armillary.planning.training.train_case import TrainCase
from armillary.profiling.ceilings.collectives import measure_collectives
from armillary.spec.arithmetic.params import parameters
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.store.peaks import Peaks
from armillary.units import count_text, seconds_text

FULL = [Setting(model=f"armillary-{size}", tokens=tokens) for size in ("2m", "5m", "25m") for tokens in (16, 64, 256)]
HEADING = "## What it printed here"
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


def measured(settings: list[Setting], rounds: int, budget_s: float) -> list[Timed]:
    """Every setting on two processes, each with one thread on a core of its own; one of them alone in between."""
    job = {"settings": [vars(one) for one in settings], "rounds": rounds, "budget_s": budget_s}
    rows = on_ranks(__file__, job)
    return [Timed(**{field.name: row[field.name] for field in fields(Timed)}) for row in rows]


def be_a_rank(job: str) -> None:
    wanted = json.loads(job)
    settings = [Setting(**setting) for setting in wanted.pop("settings")]
    found = run(settings, **wanted)
    if found is not None:
        print(json.dumps(found))


# --- tell


def table(rows: list[Row]) -> str:
    lines = [
        "| model | tokens per rank | tokens/s on 1 | on 2 | efficiency | predicted: hidden … bare | communication "
        "| crossover |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size = count_text(parameters(row.setting.config()).total)
        rates = [f"{row.tokens_per_s(ranks):,.0f}" for ranks in (1, 2)]
        hidden, bare, share = (f"{100 * value:.0f} %" for value in (*row.expected, row.communication))
        efficiency = f"{100 * row.efficiency:.0f} % ± {100 * row.timed.spread:.0f}"
        cells = [size, row.setting.tokens, *rates, efficiency, f"{hidden} … {bare}", share]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {row.crossover:.0f} tokens |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> list[str]:
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


def worth(rows: list[Row]) -> str:
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


def plot(rows: list[Row], path: Path) -> str:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: pip install matplotlib"
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(row.setting.model for row in rows):
        mine = [row for row in rows if row.setting.model == name]
        tokens = [row.setting.tokens for row in mine]
        label = f"{count_text(parameters(mine[0].setting.config()).total)} parameters"
        error = [100 * row.timed.spread for row in mine]
        line = axes[0].errorbar(tokens, [100 * row.efficiency for row in mine], error, fmt="o-", capsize=3, label=label)
        hidden, bare = ([100 * row.expected[i] for row in mine] for i in range(2))
        axes[0].fill_between(tokens, bare, hidden, color=line[0].get_color(), alpha=0.12)
        axes[1].plot(tokens, [100 * row.communication for row in mine], "o-", label=label)
        axes[1].axvline(mine[-1].crossover, color=line[0].get_color(), linestyle=":", alpha=0.8)
    axes[0].fill_between([], [], [], color="grey", alpha=0.3, label="predicted: nothing to all of the exchange hidden")
    axes[1].plot([], [], ":", color="grey", label="crossover: exchange = computing")
    axes[0].axhline(50, color="grey", linewidth=0.8)
    for axis, title in zip(axes, ("efficiency of two ranks, %", "share of the step that is exchange, %"), strict=True):
        axis.set(xscale="log", xlabel="tokens per rank and step", title=title, ylim=(0, None))
        axis.set_xticks(ticks := sorted({row.setting.tokens for row in rows}), [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    return str(path)


def put_into(page: Path, rows: list[Row], plotted: str) -> None:
    """The end of the guide, from its last heading on, becomes this run."""
    image = page.parent / "images" / "ddp_scaling.png"
    if Path(plotted).is_file():
        image.parent.mkdir(exist_ok=True)
        shutil.copy(plotted, image)
    rounds = min(row.timed.rounds for row in rows)
    cores = len(os.sched_getaffinity(0))
    said = (
        f"{datetime.date.today()} · {cores} cores of {machine().cpu.model} · torch {torch.__version__} · "
        f"`python examples/ddp_scaling.py`, medians of at least {rounds} rounds, ± half the quartiles' distance:"
    )
    text = page.read_text().partition(HEADING)[0].rstrip()
    lines = [text, "", HEADING, "", said, "", table(rows), "", "```", *verdict(rows), "```"]
    if image.is_file():
        lines += ["", f"![efficiency and share of the exchange](images/{image.name})"]
    page.write_text("\n".join(lines) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="two tiny settings, to see that it runs")
    options.add_argument("--rounds", type=int, help="of each kind of step, at least")
    options.add_argument("--out", type=Path, default=Path("ddp_scaling"), help="folder for table and plot")
    options.add_argument("--page", type=Path, help="guide whose last section becomes this run")
    options.add_argument("--rank", help=argparse.SUPPRESS)
    quick, count, out, page, rank = vars(options.parse_args()).values()
    if rank:
        return be_a_rank(rank)
    settings, rounds, budget_s = (QUICK, count or 3, 0.0) if quick else (FULL, count or 15, 8.0)
    if len(os.sched_getaffinity(0)) < 2:
        print("only one core: two ranks will share it, so expect an efficiency near 50 % and little else")
    print("predicting: ceilings of one thread, and an all-reduce between two ranks …")
    peaks = one_core(quick)
    expected = [(predict(setting, peaks, 1), predict(setting, peaks, 2)) for setting in settings]
    for setting, (one, two) in zip(settings, expected, strict=True):
        alone_s, comm_s = float(one.total[0]), float(two.comm[0])
        print(
            f"  {setting.model}, {setting.tokens} tokens per rank: step {seconds_text(alone_s)} alone, exchange "
            f"{seconds_text(comm_s)}: efficiency {100 * alone_s / float(two.total[0]):.0f} % if it hides, "
            f"{100 * alone_s / (alone_s + comm_s):.0f} % if not"
        )
    print("measuring: one rank, both without and both with the exchange, in turns …")
    found = measured(settings, rounds, budget_s)
    rows = [Row(setting=s, timed=t, predicted=p) for s, t, p in zip(settings, found, expected, strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join([table(rows), "", *verdict(rows)])
    (out / "table.md").write_text(text + "\n")
    plotted = plot(rows, out / "plot.png")
    print(f"\n{text}\n\ntable: {out / 'table.md'} · plot: {plotted}")
    if page is not None:
        put_into(page, rows, plotted)


if __name__ == "__main__":
    main()
