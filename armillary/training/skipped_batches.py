"""skipped_batches.jsonl in a run's folder: batches that a guard reported or skipped, with their samples."""

import time
from dataclasses import asdict

from armillary.store import nan_safe_json
from armillary.store.atomic import plain_errors
from armillary.store.runs import Run
from armillary.training.data.row_origin import row_origins, shards_text
from armillary.training.trainer import Trainer

NAME = "skipped_batches.jsonl"


class SkippedBatches:
    """`note(step, why)` on every rank; the main rank writes."""

    def __init__(self, run: Run, trainer: Trainer) -> None:
        self._path, self._trainer = run.folder / NAME, trainer

    def note(self, step: int, why: str) -> str:
        """Append the batch of a step; gives ', its rows are from …' for a message."""
        number = self._trainer.batches.data_step(step)
        origins = row_origins(self._trainer.text.train, number)
        if self._trainer.ranks.is_main:
            action = self._trainer.job.on_spike
            record = {"time": time.time(), "step": step, "batch": number, "why": why, "action": action}
            line = nan_safe_json.dumps(record | {"rows": [asdict(origin) for origin in origins]})
            with plain_errors(self._path), self._path.open("a") as file:
                file.write(line + "\n")
        return f"; its rows are from {shards_text(origins)}" if origins else ""
