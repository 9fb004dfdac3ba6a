"""Pipeline bubbles by number of micro-batches: four stages that sleep instead of computing, measured and by formula.

    python examples/pipeline_bubbles.py             a minute; writes pipeline_bubbles/table.md and plot.svg
    python examples/pipeline_bubbles.py --quick     two stages, in seconds

A stage is a process; a pass is a sleep, so four of them need no four cores, and what is measured is the schedule.
docs/exercises/pipeline_bubbles.md says what to predict first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

from exercise import finish, read_options, table

from armillary.planning.training.step_time import idle_s
from armillary.report.charts import lines
from armillary.units import seconds_text

FORWARD_S = 0.1
BACKWARD_S = 2 * FORWARD_S
"""the backward pass does about twice the work of the forward pass"""
Pass = tuple[str, int]
"""F or B, and the micro-batch"""


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """All forward passes, then all backward passes: every micro-batch's activations are held."""
    return [("F", i) for i in range(micro_batches)] + [("B", i) for i in range(micro_batches)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """As many forward passes as there are stages behind, then one backward for each forward pass."""
    ahead = min(stages - stage, micro_batches)
    order: list[Pass] = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        order.append(("B", i))
        if ahead + i < micro_batches:
            order.append(("F", ahead + i))
    return order


SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}


def most_held(order: Sequence[Pass]) -> int:
    """Micro-batches whose activations a stage holds at once."""
    held = most = 0
    for letter, _ in order:
        held += 1 if letter == "F" else -1
        most = max(most, held)
    return most


def stage_process(order: Sequence[Pass], before: Connection | None, after: Connection | None, told: Connection) -> None:
    """Run the passes in order; hidden states come from before, gradients from after."""
    told.recv()
    begin, busy = time.perf_counter(), 0.0
    for letter, batch in order:
        source, sink, seconds = (before, after, FORWARD_S) if letter == "F" else (after, before, BACKWARD_S)
        if source is not None:
            assert source.recv() == batch, "the neighbour's order is the same"
        at = time.perf_counter()
        time.sleep(seconds)
        busy += time.perf_counter() - at
        if sink is not None:
            sink.send(batch)
    told.send((begin, time.perf_counter(), busy))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: from the first stage's begin to the last one's end, and the seconds in which stages worked."""

    seconds: float
    busy_s: float
    stages: int

    @property
    def idle(self) -> float:
        return 1 - self.busy_s / (self.stages * self.seconds)


def measure(schedule: str, stages: int, micro_batches: int) -> Step:
    links = [Pipe() for _ in range(stages - 1)]
    told = [Pipe() for _ in range(stages)]
    processes = []
    for stage in range(stages):
        before = links[stage - 1][1] if stage else None
        after = links[stage][0] if stage < stages - 1 else None
        order = SCHEDULES[schedule](stage, stages, micro_batches)
        processes.append(Process(target=stage_process, args=(order, before, after, told[stage][1]), daemon=True))
        processes[-1].start()
    for ours, _ in told:
        ours.send("begin")
    times = [ours.recv() for ours, _ in told]
    for process in processes:
        process.join()
    seconds = max(end for _, end, _ in times) - min(begin for begin, _, _ in times)
    return Step(seconds=seconds, busy_s=sum(busy for _, _, busy in times), stages=stages)


def formula(stages: int, micro_batches: int) -> float:
    """(p − 1) / (m + p − 1), as the planner has it: fill and drain over the whole step."""
    fill = float(idle_s(False, stages, 1, FORWARD_S, BACKWARD_S, 0.0))
    return fill / (micro_batches * (FORWARD_S + BACKWARD_S) + fill)


def main() -> None:
    options = read_options("pipeline_bubbles", __doc__)
    stages, counts = (2, (1, 4)) if options.quick else (4, (1, 2, 4, 8, 16, 32))
    found = {(name, m): measure(name, stages, m) for m in counts for name in SCHEDULES}
    rows = [
        (
            str(m),
            f"{formula(stages, m):.1%}",
            *(f"{found[name, m].idle:.1%}" for name in SCHEDULES),
            *(seconds_text(found[name, m].seconds / m) for name in SCHEDULES),
            *(str(most_held(order(0, stages, m))) for order in SCHEDULES.values()),
        )
        for m in counts
    ]
    heads = ("micro-batches", "formula", *(f"idle, {name}" for name in SCHEDULES))
    heads += (*(f"per micro-batch, {name}" for name in SCHEDULES), *(f"held, {name}" for name in SCHEDULES))
    text = f"{stages} stages, forward {seconds_text(FORWARD_S)}, backward {seconds_text(BACKWARD_S)}:\n\n"
    text += table(heads, rows)
    series = [("formula", [(float(m), formula(stages, m)) for m in counts])]
    series += [(name, [(float(m), found[name, m].idle) for m in counts]) for name in SCHEDULES]
    chart = lines(
        series, label="Idle share over micro-batches", x_name="micro-batches", y_text=lambda share: f"{share:.0%}"
    )
    finish(options, text, chart, "idle share over the number of micro-batches")


if __name__ == "__main__":
    main()
