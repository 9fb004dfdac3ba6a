"""Builds speculative decoding from [serve]: the draft model, measured costs, and their part in the scheduler."""

import time
from collections.abc import Callable
from typing import Any

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.runner.draft_head import DraftHead
from armillary.engine.runner.draft_model import DraftModel
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.rank_layout import RankLayout
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.speculative.draft import Draft
from armillary.engine.speculative.draft_length import LengthController
from armillary.engine.speculative.speculation import Speculation
from armillary.engine.speculative.step_costs import StepCosts
from armillary.engine.telemetry.step_calibration import StepShape, decision_of
from armillary.errors import BadInput
from armillary.model.multi_token import MtpLayer
from armillary.model.transformer import Transformer
from armillary.spec.arithmetic.params import parameters
from armillary.spec.tables.serve import Serve

_MOST_ROWS = 64  # rows of a step, draft tokens included, where serve.max_running is less
_REPEATS = 3  # timed steps of each size; the fastest counts
_ENOUGH_S = 1.0  # no further size is timed after so many seconds
_UNMEASURED = {1: 1.0, 16: 1.05, 64: 1.3, 256: 2.0}
"""relative times of steps on several ranks, which cannot be timed before all of them follow: corrected by every step"""


def step_rows(serve: Serve) -> int | None:
    """Most rows of a step where draft tokens are among them; None without speculation."""
    if serve.speculate == "none":
        return None
    return min(serve.max_tokens_per_step, max(serve.max_running, _MOST_ROWS))


def make_draft(
    executor: FastExecutor,
    serve: Serve,
    draft: Transformer | MtpLayer | None,
    ranks: RankLayout | None,
    block_tokens: int,
) -> DraftModel | None:
    """The draft model, or head, on the executor's rows; None where drafts are found by prompt lookup, or not at all."""
    if not serve.has_draft_model:
        return None
    what = "a draft model" if serve.speculate == "draft" else "a draft head"
    if ranks is not None and ranks.pipeline is not None:
        raise BadInput(f"{what} does not run on stages of layers yet; take serve.speculate=ngram, or leave serve.pp 1")
    group = None if ranks is None or ranks.tp.size == 1 else ranks.tp
    options: dict[str, Any] = {"block_tokens": block_tokens, "graphs": serve.graphs, "group": group}
    if serve.speculate == "mtp":
        if not isinstance(draft, MtpLayer):
            raise no_head(executor.forward.model.config.name)
        draft_model: DraftModel = DraftHead(executor, draft, **options)
    elif isinstance(draft, Transformer):
        draft_model = DraftModel(executor, draft, **options)
    else:
        raise BadInput("serve.speculate=draft needs a model that drafts; name it with serve.draft")
    executor.draft_model = draft_model
    return draft_model


def no_head(name: str) -> BadInput:
    return BadInput(
        f"{name} has no layer for multi-token prediction, and no draft head beside it; train one with armillary train "
        f"RECIPE --draft-for {name}, or take serve.speculate=ngram"
    )


def speculate(
    scheduler: Scheduler, executor: FastExecutor, serve: Serve, draft: DraftModel | None, ranks: RankLayout | None
) -> None:
    """Let the scheduler draft tokens."""
    max_rows = step_rows(serve)
    if max_rows is None:
        return
    settings, cache = scheduler.settings, scheduler.cache
    sizes = [rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256) if rows <= max_rows and rows < settings.max_model_len]
    if ranks is None:
        verify = StepCosts(_timed(sizes, lambda rows: executor.tokens(executor.launch(_verify(rows, cache)))))
    else:
        verify = StepCosts(_UNMEASURED, is_relative=True)
    propose = None if draft is None else _propose_costs(draft, executor, sizes, cache, measured=ranks is None)
    max_len = min(settings.max_model_len, settings.rope_switch or settings.max_model_len)

    def make(own: KVCache) -> Speculation:
        return Speculation(
            LengthController(verify, propose, serve.max_draft),
            own,
            has_model=draft is not None,
            lag=0 if draft is None else draft.lag,
            max_rows=max_rows,
            max_len=max_len if draft is None else min(max_len, draft.max_len),
            totals=scheduler.totals,
        )

    scheduler.speculate(make)


def _propose_costs(
    draft: DraftModel, executor: FastExecutor, sizes: list[int], cache: KVCache, *, measured: bool
) -> StepCosts:
    """Of a pass of the draft model; on several ranks in proportion to its weights."""
    if measured:
        return StepCosts(_timed(sizes, lambda rows: _run(draft, rows, cache)))
    drafting, verifying = (parameters(each.forward.model.config).total for each in (draft.executor, executor))
    share = drafting / verifying
    return StepCosts({rows: share * cost for rows, cost in _UNMEASURED.items()}, is_relative=True)


def _timed(sizes: list[int], run: Callable[[int], object]) -> dict[int, float]:
    """Seconds of a step by its rows."""
    measured: dict[int, float] = {}
    begin = time.perf_counter()
    for rows in sizes:
        times = []
        for _ in range(1 + _REPEATS):  # the first run may choose kernels and touch memory
            start = time.perf_counter()
            run(rows)
            times.append(time.perf_counter() - start)
        measured[rows] = min(times[1:])
        if time.perf_counter() - begin > _ENOUGH_S and len(measured) > 3:
            break
    return measured


def _verify(rows: int, cache: KVCache) -> Decision:
    """A decode with rows - 1 draft tokens, on a free row."""
    decision = decision_of(StepShape(decodes=1, context=rows), cache)
    seq = decision.decodes[0]
    decision.positions[0] = 0
    if rows > 1:
        draft = Draft(seq, 0, 1, rows - 1, [0] * (rows - 1), 0)
        draft.at = 1
        decision.drafts.append(draft)
        decision.decodes += [seq] * (rows - 1)
        decision.positions += range(1, rows)
        decision.rows += [seq.row] * (rows - 1)
        decision.sampling = list(decision.decodes)
    return decision


def _run(draft: DraftModel, rows: int, cache: KVCache) -> None:
    """A pass of the draft model over so many rows, whatever their tokens."""
    decision = _verify(rows, cache)
    decision.admitted, decision.table_updates, decision.drafts = [], [], []
    draft.run(decision)
    draft.executor.rows.tokens_RT[0, 0].item()  # wait for the device
