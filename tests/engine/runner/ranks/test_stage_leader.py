"""Stages work on steps of different requests at the same time, and give the tokens of one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armillary.engine.llm import LLM
from armillary.engine.request.constraint import Structure
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.ranks.stage_leader import known_tokens
from armillary.parallel.world import join_world
from tests.engine.fake import ask, make_scheduler
from tests.engine.runner.ranks.test_dp_leader import GREEDY, PROMPTS, TABLE, check_same, generated
from tests.engine.runner.test_rank_layout import FAMILIES, saved
from tests.engine.runner.test_reference_executor import Alternates
from tests.ranks import Ranks

REPEATED = [[5, 6, 7, 8] * 6 + [5, 6], [9, 3] * 9]
LONGER = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def served(where: str, changes: dict[str, Any]) -> dict[str, Any]:
    """On each rank: what was generated, and how many steps were in flight when others were decided."""
    with join_world("cpu") as world, LLM(where, replace(TABLE, **changes), world=world) as llm:
        if world.rank:
            return {"steps": llm.follow()}
        scheduler, in_flight = llm.engine.scheduler, Counter[int]()
        schedule = scheduler.schedule

        def counted(now: float) -> Any:
            in_flight[len(scheduler.under_way)] += 1
            return schedule(now)

        scheduler.schedule = counted  # type: ignore[method-assign]
        found = {"every": generated(llm), "in_flight": in_flight, "structured": structured(llm)}
        return found | {"repeated": repeated(llm), "state": llm.engine.state()}


def structured(llm: LLM) -> list[list[int]]:
    """Outputs that a grammar limits, several at once."""
    structure = Structure(kind="regex", source="alternating")
    requests = [ask(f"s{i}", [2 + i, 3], 20, temperature=0.0, structure=structure) for i in range(4)]
    return [made.tokens for made in llm.engine.generate(requests, {request.id: Alternates for request in requests})]


def repeated(llm: LLM) -> list[list[int]]:
    return [made.tokens for made in llm.generate(REPEATED, LONGER)]


def check(ranks: Ranks, folder: Path, size: int, **changes: Any) -> dict[str, Any]:
    first, *others = ranks.run(size, served, str(folder), changes)
    alone = LLM(folder, replace(TABLE, speculate=changes.get("speculate", "none")), device="cpu")
    check_same(first["every"], generated(alone))
    assert first["structured"] == structured(alone) and first["repeated"] == repeated(alone)
    assert {rank["steps"] for rank in others} == {others[0]["steps"]} and others[0]["steps"] > 40
    stages, in_flight = changes["pp"], first["in_flight"]
    assert max(in_flight) == stages - 1 and in_flight[stages - 1] > sum(in_flight.values()) / 2
    assert not first["state"]["running"] and not first["state"]["kv_used_fraction"]
    return first  # type: ignore[no-any-return]


def test_two_stages_give_the_tokens_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Tied embeddings and windows; drafts by prompt lookup."""
    found = check(ranks, saved(tmp_path, "gemma2"), 2, pp=2, speculate="ngram")
    assert found["state"]["accepted_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_of_every_kind(ranks: Ranks, tmp_path: Path, family: str) -> None:
    check(ranks, saved(tmp_path, family), 2, pp=2)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_four_ranks(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    """Two ranks per stage, or one."""
    folder = saved(tmp_path, "mixtral", num_hidden_layers=4)
    check(ranks, folder, 4, pp=stages)


def preempted(where: str, kv_bytes: int) -> Any:
    table = replace(TABLE, pp=2, kv_bytes=kv_bytes, max_model_len=28)
    with join_world("cpu") as world, LLM(where, table, world=world) as llm:
        if world.rank:
            return llm.follow()
        admission = llm.engine.scheduler.admission
        admission.reserve, admission.learns = 0.0, False
        return [made.tokens for made in llm.generate(PROMPTS, GREEDY)], llm.engine.state()["preemptions_total"]


def test_preempted_requests_wait_for_tokens_in_flight(ranks: Ranks, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", num_hidden_layers=2)
    alone = LLM(folder, TABLE, device="cpu")
    (found, count), _ = ranks.run(2, preempted, str(folder), 5 * alone.plan.block_bytes)
    assert found == [made.tokens for made in alone.generate(PROMPTS, GREEDY)] and count > 0


def test_steps_bring_the_tokens_that_decodes_follow() -> None:
    scheduler = make_scheduler(num_blocks=30)
    for name, token in (("a", 7), ("b", 8)):
        scheduler.submit(ask(name, [2, 3, token], 8), 0.0)
    first = scheduler.schedule(0.0)
    assert known_tokens(first) is None  # prompts are there already
    scheduler.update(first, [21, 22], 0.0)
    known = known_tokens(scheduler.schedule(0.0))
    assert known is not None
    np.testing.assert_array_equal(known, [[0, 1], [3, 3], [21, 22]])
