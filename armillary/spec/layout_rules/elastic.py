"""The layout of an elastic run: as many data-parallel ranks as there are devices for, and all else as it was."""

from dataclasses import replace

from armillary.errors import BadInput, BadLayout
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.rules import check_layout, layout_problems
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob


def ranks_per_replica(layout: Layout) -> int:
    """tp × pp × cp: the ranks of dp=1."""
    return layout.num_devices // layout.dp


def elastic_layout(layout: Layout, model: ModelConfig, job: TrainJob, num_ranks: int) -> Layout | None:
    """The layout with the largest dp that `num_ranks` allow; None where they are too few. The batch stays the same: dp
    divides it, or some ranks have a row less (`uneven`). BadLayout where no number of ranks would do."""
    if num_ranks < 1:
        raise BadInput(f"{num_ranks} ranks cannot train anything; give at least one")
    case = Case(
        model=model,
        num_devices=num_ranks,
        sequence=job.sequence,
        batch_tokens=job.batch_tokens,
        by_trainer=True,
        compiled=job.compiled,
    )
    most = num_ranks // ranks_per_replica(layout)
    for dp in range(most, 0, -1):
        for uneven in (False, True):
            smaller = replace(layout, dp=dp, uneven=uneven)
            if not any(layout_problems(smaller, case)):
                return smaller
    anywhere = replace(case, num_devices=None)
    if any(layout_problems(layout, anywhere)):
        limits = {"sequence": job.sequence, "batch_tokens": job.batch_tokens, "compiled": job.compiled}
        check_layout(layout, model, by_trainer=True, **limits)  # type: ignore[arg-type]
        raise BadLayout(f"{layout.text()} cannot train; change the layout")
    return None
