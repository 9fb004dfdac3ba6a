"""The terminal view of a training run: a bar with plan and measurement, memory by category, and how it ended."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from armillary.cli.output import Output, path_text
from armillary.spec.plan import Plan
from armillary.store.runs import Run
from armillary.units import bytes_text, duration_text, scaled

if TYPE_CHECKING:
    from armillary.training.run_lifecycle import Trained
    from armillary.training.telemetry.step_telemetry import StepReport

CATEGORIES = ("weights", "master", "gradients", "optimizer", "activations", "loss", "buffers", "other")
_SPLIT = ("compute_s", "comm_exposed_s", "bubble_s", "overhead_s")


class TrainView:
    """Sees the reports of the main rank: `with TrainView(…) as view: train(…, watch=view)`."""

    def __init__(self, out: Output, plan: Plan, run: Run, *, brief: bool = False) -> None:
        """`brief` shows the bar alone, not what single steps tell of memory and time."""
        self.out, self.plan, self.run, self.brief = out, plan, run, brief
        self._stack = ExitStack()
        self._live: dict[str, object] = {}
        self._bar: Any = None

    def __enter__(self) -> Self:
        assert self.plan.train is not None
        self._bar = self._stack.enter_context(self.out.progress("train", total=self.plan.train.steps, unit="step"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __call__(self, report: StepReport) -> None:
        self._live |= live(report.gauges, self.plan.predicted)
        self._bar.at(report.step + 1, None, **self._live)
        if self.brief:
            return
        if "memory_activations_bytes" in report.gauges:
            self._say_memory(report)
        if "compute_s" in report.gauges:
            self.out.say(split_text(report.step, report.gauges, self.plan.predicted))

    def _say_memory(self, report: StepReport) -> None:
        rows = memory_rows(report.gauges, self.plan.predicted)
        how = report.sources.get("memory_activations_bytes", "")
        self.out.say(f"memory at the peak of step {report.step}, main rank ({how})")
        self.out.table("", ["", "planned", "measured", "error"], rows)


def live(gauges: dict[str, float], planned: Any) -> dict[str, object]:
    """The figures beside the bar, each with its plan."""
    fields: dict[str, object] = {"loss": f"{gauges['loss']:.3f}"}
    if "val_loss" in gauges:
        fields["val"] = f"{gauges['val_loss']:.3f}"
    fields["speed"] = f"{scaled(gauges['tokens_per_s_per_device'])} tok/s/dev" + _plan(
        planned, "tokens_per_s_per_device", scaled
    )
    if "mfu" in gauges:
        fields["MFU"] = f"{gauges['mfu']:.0%}" + _plan(planned, "mfu", "{:.0%}".format)
    fields["memory"] = bytes_text(gauges["memory_peak_bytes"]) + _plan(planned, "memory_peak_bytes", bytes_text)
    fields["data_wait"] = f"{gauges['data_wait_fraction']:.1%}"
    if gauges.get("skipped_steps_total"):
        fields["skipped"] = int(gauges["skipped_steps_total"])
    return fields


def _plan(planned: Any, name: str, text: Any) -> str:
    return f" (plan {text(planned[name])})" if name in planned else ""


def memory_rows(gauges: dict[str, float], planned: Any) -> list[list[object]]:
    """By category, and all that a framework's allocator counts; what lies outside it is planned but not seen here."""
    rows: list[list[object]] = []
    totals = [0.0, 0.0]
    for name in CATEGORIES:
        key = f"memory_{name}_bytes"
        pair = planned.get(key), gauges.get(key)
        if any(pair) and name != "other":
            totals = [total + (each or 0.0) for total, each in zip(totals, pair, strict=True)]
            rows.append([name, *(bytes_text(each) if each is not None else None for each in pair), _error(*pair)])
    rows.append(["together", *(bytes_text(total) for total in totals), _error(*totals)])
    if "offloaded_bytes" in gauges:
        out = planned.get("offloaded_bytes"), gauges["offloaded_bytes"]
        rows.append(["on the host", *(bytes_text(each) if each is not None else None for each in out), _error(*out)])
    return rows


def _error(planned: float | None, measured: float | None) -> str | None:
    return f"{planned / measured - 1:+.0%}" if planned and measured else None


def split_text(step: int, gauges: dict[str, float], planned: Any) -> str:
    """One line on where the time of a recorded step went."""
    parts = [
        f"{name.removesuffix('_s').replace('_', ' ')} {duration_text(gauges[name])}"
        + _plan(planned, name, duration_text)
        for name in _SPLIT
    ]
    return f"step {step}, recorded: " + "  ".join(parts)


# --- how it ended


def outcome_of(done: Trained) -> dict[str, Any]:
    """The end of a run as --json prints it."""
    return {
        "run": done.run.id,
        "steps": done.steps,
        "finished": done.finished,
        "resumed_at": done.resumed_at,
        "checkpoint": done.saved,
        "loss": done.loss,
        "val_loss": done.val_loss,
        "export": str(done.export) if done.export else None,
    }


def say_end(out: Output, run: Run, outcome: dict[str, Any], *, brief: bool = False) -> None:
    val = f" · held-out loss {outcome['val_loss']:.3f}" if outcome["val_loss"] is not None else ""
    how = "finished" if outcome["finished"] else "stopped"
    out.say(f"{how} after {outcome['steps']:,} steps · loss {outcome['loss']:.3f}{val}")
    if outcome["export"]:
        out.say(f"exported {path_text(Path(outcome['export']))}")
        if not brief:
            out.say(f'next: armillary generate {run.name} "def main"')
    elif outcome["checkpoint"] is not None:
        out.say(f"checkpoint {outcome['checkpoint']} written, resume with the same command")
        out.say(f"to use it as it is: armillary checkpoints export {run.name}")
