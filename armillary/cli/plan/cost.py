"""Money, failures and storage of a training plan, in full: every offer, owning against renting, every tier."""

from __future__ import annotations

from typing import Any

from armillary.cli.output import Output
from armillary.planning.cost.cost import offers
from armillary.planning.cost.cost_report import (
    OFFER_COLUMNS,
    STORAGE_COLUMNS,
    buying_rows,
    goodput_rows,
    offer_cells,
    storage_cells,
)
from armillary.planning.cost.failures import Goodput
from armillary.planning.cost.storage import RunStorage, run_storage
from armillary.planning.training.training_plan import TrainingPlan
from armillary.spec.toml.fields import to_plain

_SHORTEST_S = 1.0


def run_storage_of(made: TrainingPlan) -> RunStorage:
    """What the plan's run asks of storage: written beside the training, read by one copy of the model."""
    job, seconds = made.problem.recipe.train, float(made.prediction.time.total[0])
    return run_storage(
        made.problem.model,
        tokens_per_s=job.batch_tokens / seconds,
        total_tokens=job.total_tokens,
        interval_s=max(_SHORTEST_S, made.goodput.interval_s),
        steps=job.steps,
    )


def say_money(out: Output, made: TrainingPlan) -> None:
    """Offers, buying, failures and storage."""
    cluster, cost = made.problem.case.cluster, made.problem.recipe.cost
    if made.cost is not None:
        out.table("\nan hour of a device", OFFER_COLUMNS, [offer_cells(one) for one in offers(cost, cluster)])
        out.fields("", buying_rows(cost, cluster))
    out.fields("\nfailures", goodput_rows(made.goodput))
    out.table("\nstorage", STORAGE_COLUMNS, storage_cells(run_storage_of(made), cluster))


def money_plain(made: TrainingPlan) -> dict[str, Any]:
    """The same for --json."""
    cluster, cost = made.problem.case.cluster, made.problem.recipe.cost
    found: Goodput = made.goodput
    return {
        "offers": [to_plain(one) for one in offers(cost, cluster)] if made.cost is not None else [],
        "failures": {
            "mtbf_s": found.failures.mtbf_s,
            "interval_s": found.interval_s,
            "young_s": found.young_s,
            "daly_s": found.daly_s,
            "goodput_fraction": found.goodput_fraction,
            "lost": found.lost(),
        },
        "storage": [to_plain(need) for need in run_storage_of(made).needs],
    }
