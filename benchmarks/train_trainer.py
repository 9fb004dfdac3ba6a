"""The trainer itself on text, as `armillary train` runs it: loader, records and all, without checkpoints."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from train_ours import SMALL
from train_peers import SEQUENCE

from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import ModelTable
from armillary.spec.tables.train import Data, TrainJob
from armillary.store.home import Home
from armillary.training.gauge_log import Recorder
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.trainer import Trainer

TEXT_BYTES = 8_000_000
"""some two million tokens: as much as the longest measurement reads"""


@contextmanager
def trainer_step(
    home: Home, rows: int, kernels: Mapping[str, str], *, documents: bool = False
) -> Iterator[tuple[Callable[[], float], list[float]]]:
    """(one step after the other, each giving its loss; the seconds of each). The text is one document, so that rows are
    one sequence each, as in the other measurements; or `documents`, one a module, packed into rows and masked."""
    texts = library() if documents else ["\n".join(library())]
    text = home.work / ("modules.jsonl" if documents else "library.jsonl")  # text files are cut into documents
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    recipe = Recipe(
        model=ModelTable(name="tinyllama-1.1b", overrides={key: SMALL[key] for key in SMALL if key != "vocab"}),
        layout=Layout(micro_batch=rows, precision="bf16"),
        data=Data(source=str(text), held_out=0.0),
        train=TrainJob(sequence=SEQUENCE, batch_tokens=rows * SEQUENCE, profile_every=0),
    )
    seconds: list[float] = []
    begun, steps = resolve_run(recipe, home, model_source(recipe, home)), count()
    begun.prepare()
    with (
        join_world(None) as world,
        Trainer(begun.plan, world, kernels=kernels, home=home) as trainer,
        Recorder(begun.create_run(), trainer, watch=None, say=print, start=0) as record,
    ):

        def step() -> float:
            report = trainer.step(next(steps), meanwhile=record.write)
            assert report is not None
            record(report, last=False)
            seconds.append(report.gauges["step_s"])
            return report.gauges["loss"]

        yield step, seconds


def library() -> list[str]:
    """Modules of the Python library, some MB."""
    found: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if size < TEXT_BYTES and "site-packages" not in path.parts:
            found.append(path.read_text(errors="replace").replace("\0", " "))
            size += len(found[-1])
    return found
