"""Gauges sent on to TensorBoard, MLflow or Weights & Biases, in addition to gauges.jsonl, which is always written.

Each is imported only where it is asked for. One that is not installed is an error before the run starts; one that
fails later is reported once and dropped: no tracker stops a run.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from armillary.errors import missing, one_line
from armillary.store.runs import Run, Say

PROJECT = "armillary"
"""what the runs are filed under: MLflow's experiment, the project of Weights & Biases"""
_TITLES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "Weights & Biases"}


@dataclass(frozen=True, kw_only=True)
class Sink:
    """An open tracker: `send` takes a step and its gauges."""

    send: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse what is not installed; imports nothing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise missing(name, _TITLES[name], "tracking")


class Trackers:
    """`with Trackers(names, run, …) as track: track(step, gauges)`; on rank 0 only."""

    def __init__(
        self, names: Sequence[str], run: Run, *, say: Say, recipe: Mapping[str, Any] | None = None, start: int = 0
    ) -> None:
        """`say` takes one line where a tracker fails; `start` is the step from which a run resumes; `recipe` is filed
        with the run."""
        check_trackers(names)
        self._say, self._open = say, dict[str, Sink]()
        for name in dict.fromkeys(names):
            sink = self._try(name, partial(OPENERS[name], run, flat(recipe or {}), start))
            if sink is not None:
                self._open[name] = sink

    def __enter__(self) -> Self:
        return self

    def __call__(self, step: int, gauges: Mapping[str, float]) -> None:
        """Send a step's gauges to every tracker that still works."""
        for name, sink in list(self._open.items()):
            self._try(name, partial(sink.send, step, gauges))

    def __exit__(self, *error: object) -> None:
        for name, sink in list(self._open.items()):
            self._try(name, sink.close)

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        """Other people's programs and servers may fail in any way, and none of it is worth a training run."""
        try:
            return call()
        except Exception as error:
            self._open.pop(name, None)
            reason = one_line(error, 200) or type(error).__name__
            self._say(f"{_TITLES[name]} gave up ({reason}); training continues, gauges.jsonl has everything")
            return None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} as {"train.lr": 1}."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flattened


def _tensorboard(run: Run, recipe: Mapping[str, Any], start: int) -> Sink:
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=start or None)
    if not start:
        lines = [f"| {key} | {value} |" for key, value in recipe.items()]
        writer.add_text("recipe", "\n".join(["| key | value |", "|---|---|", *lines]))

    def send(step: int, gauges: Mapping[str, float]) -> None:
        for name, value in gauges.items():
            writer.add_scalar(name, value, step)

    return Sink(send=send, close=writer.close)


def _mlflow(run: Run, recipe: Mapping[str, Any], start: int) -> Sink:
    """MLflow's own server where MLFLOW_TRACKING_URI names one, else a SQLite file next to the runs."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient
    from mlflow.utils.time import get_current_time_millis

    local_file = f"sqlite:///{(run.folder.parent / 'mlflow.db').absolute()}"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local_file)
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    known = client.search_runs([number], f"tags.`armillary.run` = '{run.id}'", max_results=1) if start else []
    if known:
        target = known[0].info.run_id
        client.update_run(target, status="RUNNING")
    else:
        target = client.create_run(number, run_name=run.name, tags={"armillary.run": run.id}).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in recipe.items()]
        for first in range(0, len(params), 100):  # what one call takes
            client.log_batch(target, params=params[first : first + 100])

    def send(step: int, gauges: Mapping[str, float]) -> None:
        now = get_current_time_millis()
        client.log_batch(target, metrics=[Metric(name, float(value), now, step) for name, value in gauges.items()])

    return Sink(send=send, close=lambda: client.set_terminated(target))


def _wandb(run: Run, recipe: Mapping[str, Any], start: int) -> Sink:
    """Its own settings hold: `wandb login`, or WANDB_MODE=offline to keep everything in the run's folder."""
    import wandb

    tracked_run = wandb.init(
        project=PROJECT, name=run.name, id=run.id, resume="allow", config=dict(recipe), dir=str(run.folder)
    )

    def send(step: int, gauges: Mapping[str, float]) -> None:
        tracked_run.log(dict(gauges), step=step, commit=True)

    return Sink(send=send, close=tracked_run.finish)


OPENERS: dict[str, Callable[[Run, Mapping[str, Any], int], Sink]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
