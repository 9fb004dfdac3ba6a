"""A lever applied: the changed recipe as a file, and its prediction in the track record."""

import time
from pathlib import Path

from armillary.diagnosis.levers.apply import changed_recipe
from armillary.diagnosis.outcome.compare import as_prediction, measured
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.outcome.track_record import log_prediction
from armillary.diagnosis.readings.run_folder import read_run
from armillary.store.atomic import write_text
from armillary.store.home import Home
from armillary.store.runs import Run


def recipe_name(run: Run, number: int) -> str:
    """The usual name of the file with lever `number` applied."""
    return f"{run.name}.lever{number}.toml"


def apply_lever(home: Home, diagnosis: Diagnosis, run: Run, number: int, path: Path) -> float:
    """Write the recipe with lever `number` applied; the speed-up that is on record for it, an earlier one where it was
    predicted before."""
    lever = diagnosis.lever(number)
    write_text(path, changed_recipe(run, lever, diagnosis.kind))
    prediction = as_prediction(
        run, lever, at=time.time(), value=measured(read_run(run, home), lever.of), recipe=str(path)
    )
    return log_prediction(home, prediction).predicted
