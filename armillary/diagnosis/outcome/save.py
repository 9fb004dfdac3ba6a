"""Keep a diagnosis in the run's folder, so that what was predicted stands before a lever is pulled.

The first verdict on what a run measured is the one that counts: telling it anew afterwards is no prediction.
"""

from __future__ import annotations

from armillary.diagnosis.outcome.compare import made_at
from armillary.diagnosis.outcome.diagnosis import FILE, Diagnosis, read_diagnosis
from armillary.diagnosis.outcome.track_record import read_record
from armillary.errors import ArmillaryError
from armillary.store.atomic import write_text
from armillary.store.gauges import last_record
from armillary.store.home import Home
from armillary.store.runs import Run


def keep(run: Run, found: Diagnosis, home: Home) -> None:
    """Write diagnosis.json, unless the one that is there has to stay."""
    if not stands(run, home):
        write_text(run.folder / FILE, found.to_json())


def stands(run: Run, home: Home) -> bool:
    """Whether a diagnosis was kept that stays: a lever of the run was applied, or nothing was measured since."""
    try:
        kept = read_diagnosis(run.folder)
    except ArmillaryError:  # none yet, or a broken one
        return False
    measured = float((last_record(run.gauges) or {}).get("time", 0.0))
    return any(line.run == run.id for line in read_record(home).lines) or (kept.judged and measured < made_at(kept))
