"""How well do two ranks scale? Three models, several batch sizes, one pinned thread a rank; predicted, then measured.

    python examples/ddp_scaling.py             a few minutes on two quiet cores; writes ddp_scaling/table.md and .png
    python examples/ddp_scaling.py --quick     two tiny settings, seconds, for a look

docs/ddp_scaling.md says what to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from ddp_rank import SEQUENCE, Setting, Timed, run

from armillary.planning.case import TrainCase
from armillary.planning.layouts import of
from armillary.planning.step_time import StepTime, step_time
from armillary.profiling.collectives import measure_collectives
from armillary.profiling.machine import here
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.spec.params import parameters
from armillary.store.peaks import Peaks
from armillary.units import count_text, seconds_text

FULL = [Setting(model=f"armillary-{size}", tokens=tokens) for size in ("2m", "5m", "25m") for tokens in (16, 64, 256)]
QUICK = [Setting(model="armillary-2m", tokens=tokens) for tokens in (16, 32)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting on one rank and on two, and what was expected."""

    setting: Setting
    one: Timed
    two: Timed
    predicted: tuple[StepTime, StepTime]

    @property
    def efficiency(self) -> float:
        """throughput₂ / (2 · throughput₁); each rank has the same tokens, so it is a ratio of step times."""
        return self.one.step_s / self.two.step_s

    @property
    def expected(self) -> tuple[float, float]:
        """The plan's efficiency: with the exchange beside the backward pass, and with nothing of it hidden."""
        one, two = self.predicted
        bare = float(one.total[0])
        return bare / float(two.total[0]), bare / (bare + float(two.comm[0]))

    @property
    def communication(self) -> float:
        """Share of the step of two ranks that the exchange adds to it."""
        return max(0.0, 1 - self.two.alone_s / self.two.step_s)

    @property
    def crossover(self) -> float:
        """Tokens a rank at which the exchange takes as long as computing: seconds of one over seconds a token."""
        return self.two.exchange_s / (self.two.alone_s / self.setting.tokens)

    def tokens_per_s(self, timed: Timed, ranks: int) -> float:
        return ranks * self.setting.tokens / timed.step_s


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
    return step_time(case, of([Layout(dp=ranks, precision="fp32", micro_batch=setting.tokens // SEQUENCE)]))


# --- measure


def measured(settings: list[Setting], ranks: int, steps: int) -> list[Timed]:
    """Every setting on `ranks` processes, each with one thread on a core of its own."""
    # gloo listens on the loopback device; one thread also inside the libraries, from the start
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    job = json.dumps({"settings": [vars(setting) for setting in settings], "steps": steps})
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    ran = subprocess.run([sys.executable, *launch, __file__, "--rank", job], env=environment, text=True,
                         stdout=subprocess.PIPE, check=True)  # fmt: skip
    rows = json.loads(ran.stdout.strip().splitlines()[-1])
    return [Timed(**{name: row[name] for name in ("step_s", "alone_s", "exchange_s")}) for row in rows]


def be_a_rank(job: str) -> None:
    wanted = json.loads(job)
    found = run([Setting(**setting) for setting in wanted["settings"]], steps=wanted["steps"])
    if found is not None:
        print(json.dumps(found))


# --- tell


def table(rows: list[Row]) -> str:
    lines = ["| model | tokens a rank | tokens/s on 1 | on 2 | efficiency | predicted: hidden … bare | communication "
             "| crossover |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        size = count_text(parameters(row.setting.config()).total)
        rates = [f"{row.tokens_per_s(timed, n):,.0f}" for timed, n in ((row.one, 1), (row.two, 2))]
        efficiency, hidden, bare, share = (f"{100 * value:.0f} %" for value in
                                           (row.efficiency, *row.expected, row.communication))  # fmt: skip
        cells = [size, row.setting.tokens, *rates, efficiency, f"{hidden} … {bare}", share]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {row.crossover:.0f} tokens |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> list[str]:
    """One line a model: where it crosses over, from its largest batch, whose step is measured best."""
    lines = []
    for name in dict.fromkeys(row.setting.model for row in rows):
        mine = [row for row in rows if row.setting.model == name]
        last = mine[-1]
        gradients = parameters(last.setting.config()).total * 4
        lines.append(
            f"{count_text(gradients // 4)} parameters: {gradients / 1e6:.1f} MB of gradients take "
            f"{seconds_text(last.two.exchange_s)}, a token {seconds_text(last.two.alone_s / last.setting.tokens)}: "
            f"crossover at {last.crossover:.0f} tokens a rank; below it a step is mostly exchange"
        )
        worth = next((row.setting.tokens for row in mine if row.efficiency > 0.5), None)
        lines.append(f"  two ranks are {'faster than one from ' + str(worth) + ' tokens a rank' if worth else 'never'}"
                     f"{'' if worth else ' faster than one here'}")  # fmt: skip
    return lines


def plot(rows: list[Row], path: Path) -> str:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: pip install 'armillary[reports]'"
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(row.setting.model for row in rows):
        mine = [row for row in rows if row.setting.model == name]
        tokens = [row.setting.tokens for row in mine]
        label = f"{count_text(parameters(mine[0].setting.config()).total)} parameters"
        (line,) = axes[0].plot(tokens, [100 * row.efficiency for row in mine], "o-", label=label)
        hidden, bare = ([100 * row.expected[i] for row in mine] for i in range(2))
        axes[0].fill_between(tokens, bare, hidden, color=line.get_color(), alpha=0.12)
        axes[1].plot(tokens, [100 * row.communication for row in mine], "o-", label=label)
        axes[1].axvline(mine[-1].crossover, color=line.get_color(), linestyle=":", alpha=0.8)
    axes[0].fill_between([], [], [], color="grey", alpha=0.3, label="predicted: nothing to all of the exchange hidden")
    axes[1].plot([], [], ":", color="grey", label="crossover: exchange = computing")
    axes[0].axhline(50, color="grey", linewidth=0.8)
    for axis, title in zip(axes, ("efficiency of two ranks, %", "share of the step that is exchange, %"), strict=True):
        axis.set(xscale="log", xlabel="tokens a rank and step", title=title, ylim=(0, None))
        axis.set_xticks(ticks := sorted({row.setting.tokens for row in rows}), [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return str(path)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="two tiny settings, to see that it runs")
    options.add_argument("--steps", type=int, help="steps whose median counts")
    options.add_argument("--out", type=Path, default=Path("ddp_scaling"), help="folder for table and plot")
    options.add_argument("--rank", help=argparse.SUPPRESS)
    quick, count, out, rank = vars(options.parse_args()).values()
    if rank:
        return be_a_rank(rank)
    settings, steps = (QUICK, count or 2) if quick else (FULL, count or 7)
    if len(os.sched_getaffinity(0)) < 2:
        print("only one core: two ranks will share it, so expect an efficiency near 50 % and little else")
    print("predicting: ceilings of one thread, and an all-reduce between two ranks …")
    peaks = one_core(quick)
    expected = [(predict(setting, peaks, 1), predict(setting, peaks, 2)) for setting in settings]
    for setting, (one, two) in zip(settings, expected, strict=True):
        alone_s, comm_s = float(one.total[0]), float(two.comm[0])
        print(f"  {setting.model}, {setting.tokens} tokens a rank: step {seconds_text(alone_s)} alone, exchange "
              f"{seconds_text(comm_s)}: efficiency {100 * alone_s / float(two.total[0]):.0f} % if it hides, "
              f"{100 * alone_s / (alone_s + comm_s):.0f} % if not")  # fmt: skip
    print("measuring: one rank, then two …")
    alone, together = measured(settings, 1, steps), measured(settings, 2, steps)
    rows = [Row(setting=s, one=a, two=b, predicted=p)
            for s, a, b, p in zip(settings, alone, together, expected, strict=True)]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join([table(rows), "", *verdict(rows)])
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\ntable: {out / 'table.md'} · plot: {plot(rows, out / 'plot.png')}")


if __name__ == "__main__":
    main()
