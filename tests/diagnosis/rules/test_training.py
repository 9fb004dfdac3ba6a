"""Rules of the training loop, each with figures that fire it and figures that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.stragglers import find_straggler, recent_straggler, stage_flops
from armillary.diagnosis.evidence.thresholds import COLLAPSED_ROUTER_SHARE
from armillary.diagnosis.rules.training import (
    bad_placement,
    bubble,
    checkpoint_stall,
    expert_imbalance,
    exposed_communication,
    memory_pressure,
    needless_offload,
    needless_recompute,
    straggler,
    validation_stall,
)
from armillary.spec import catalogue
from tests.diagnosis.trained import NOWHERE, plan_of, reading_of


def test_exchanges_that_nothing_hides() -> None:
    made = reading_of(plan_of("layout.tp=8", "layout.dp=1"), comm_exposed_s=0.4)
    found = exposed_communication(made, made.plan)
    assert found is not None and found.share == pytest.approx(0.4) and found.evidence[0].against == "plan"
    assert exposed_communication(reading_of(comm_exposed_s=0.03), None) is None
    verdict = diagnose(made, NOWHERE)
    assert (verdict.loop, verdict.cause) == ("training", "exposed_communication")
    assert verdict.levers[0].change["layout.tp"] == 1 and verdict.levers[0].speedup > 1.2


def test_groups_of_ranks_that_machines_cut_through() -> None:
    """tp = 8 on machines of 5 and 3 ranks: named before the exchanges that are slow because of it."""
    told = {"group_machines": 2.0, "group_machines_least": 1.0}
    made = reading_of(plan_of("layout.tp=8", "layout.dp=1"), comm_exposed_s=0.4, **told)
    verdict = diagnose(made, NOWHERE)
    assert (verdict.loop, verdict.cause) == ("training", "bad_placement")
    assert "--ntasks-per-node" in verdict.levers[0].action and verdict.levers[0].at_most == pytest.approx(1 / 0.6)
    assert "exposed_communication" in {finding.cause for finding in verdict.findings}
    for least, exposed in ((2.0, 0.4), (1.0, 0.03)):
        fine = reading_of(comm_exposed_s=exposed, **told | {"group_machines_least": least})
        assert bad_placement(fine, None) is None, "as few machines as can be, or nothing lost by it"
    assert bad_placement(reading_of(comm_exposed_s=0.4), None) is None, "not told"


def test_copies_that_sum_gradients_too_often() -> None:
    """Plain data parallelism has no axis to give up: it talks after more tokens, or in smaller pieces."""
    made = reading_of(plan_of("train.batch_tokens=32768"), comm_exposed_s=0.4)
    verdict = diagnose(made, NOWHERE)
    assert (verdict.loop, verdict.cause) == ("training", "exposed_communication")
    first = verdict.levers[0]
    assert first.change == {"train.batch_tokens": 65536} and first.of == "tokens_per_s"
    assert first.speedup == pytest.approx(2 / (2 * 0.6 + 0.4), rel=0.15), "work twice, gradients once"
    assert any("layout.bucket_bytes" in lever.change for lever in verdict.levers)


def test_one_slow_rank_is_the_cause_of_the_others_waiting() -> None:
    made = reading_of(comm_exposed_s=0.45, rank_spread_s=0.4, slowest_rank=3.0)
    found = straggler(made, None)
    assert found is not None and found.share == pytest.approx(0.4) and "rank 3" in found.says
    assert exposed_communication(made, None) is None, "what is left of the waiting is little"


def test_a_straggler_is_told_with_its_cause_and_since_when() -> None:
    late = reading_of(rank_spread_s=0.4, slowest_rank=3.0, slowest_rank_data_s=0.35)
    found = straggler(late, None)
    assert found is not None and "because of its data loader" in found.says
    one = find_straggler(reading_of(rank_spread_s=0.4, slowest_rank=3.0, slowest_rank_data_s=0.01), None)
    assert one is not None and one.cause == "compute"


def test_a_rank_that_became_slow_in_the_second_half() -> None:
    begin = 100
    late = reading_of(
        count=200,
        rank_spread_s=lambda step: 0.4 if step >= begin else 0.01,
        slowest_rank=lambda step: 2.0 if step >= begin else float(step % 4),
    )
    assert find_straggler(late, None) is None, "not in every part of the run"
    recent = recent_straggler(late, None)
    assert recent is not None and recent.rank == 2 and abs(recent.since - begin) <= 12


def test_ranks_that_take_turns_are_a_busy_machine() -> None:
    made = reading_of(rank_spread_s=0.3, slowest_rank=lambda step: float(step % 2))
    assert find_straggler(made, None) is None and straggler(made, None) is None
    small = reading_of(rank_spread_s=0.03, slowest_rank=1.0)
    assert find_straggler(small, None) is not None and straggler(small, None) is None
    assert straggler(reading_of(), None) is None


def test_waiting_for_ranks_that_are_late_in_turn_is_no_exchange() -> None:
    late = {"rank_spread_s": 0.6, "slowest_rank": lambda step: float(step % 2)}
    assert exposed_communication(reading_of(comm_exposed_s=0.34, **late), None) is None
    found = exposed_communication(reading_of(comm_exposed_s=0.5, **late), None)
    assert found is not None and found.share == pytest.approx(0.2, abs=0.02), "the rest is"
    plan = plan_of("layout.pp=2", "layout.dp=4")
    stages = reading_of(plan, comm_exposed_s=0.12, bubble_s=0.1, rank_spread_s=0.1, slowest_rank=4.0)
    assert exposed_communication(stages, plan) is not None, "a heavier stage is waited for in the bubble"


def test_a_rank_that_is_late_by_chance() -> None:
    """The same rank in six of eight steps, now by much and now by little: two fair coins do that often."""
    spreads = (0.4, 0.05, 0.5, 0.1, 0.6, 0.02, 0.3, 0.15)
    made = reading_of(
        count=8, rank_spread_s=lambda step: spreads[step], slowest_rank=lambda step: float(step not in (2, 6))
    )
    assert straggler(made, None) is None
    assert straggler(reading_of(count=4, rank_spread_s=0.4, slowest_rank=1.0), None) is None, "too few to tell"


def test_a_rank_that_was_late_for_a_time() -> None:
    """Steps beside each other are held up by the same thing: a busy core slows one rank for many of them on end."""
    late = {"count": 23, "rank_spread_s": 0.2, "slowest_rank": 1.0}
    assert straggler(reading_of(**late), None) is not None
    then = late | {"rank_spread_s": lambda step: 0.02 if step > 17 else 0.2}
    assert find_straggler(reading_of(**then), None) is None, "the last quarter was without it"


def test_a_main_rank_that_is_late_itself() -> None:
    made = reading_of(rank_spread_s=0.4, slowest_rank=0.0, comm_exposed_s=0.02)
    found = straggler(made, None)
    assert found is not None and "rank 0" in found.says


def test_stages_are_not_alike() -> None:
    made = reading_of(plan_of("layout.pp=2", "layout.dp=4"), rank_spread_s=0.2, slowest_rank=1.0)
    assert straggler(made, made.plan) is None


def test_a_stage_with_more_to_do_is_not_late() -> None:
    """Two layers and a head as large as three: the last stage takes longer, and only what is beyond that is a fault."""
    plan = plan_of("layout.pp=2", "layout.dp=4", "model.num_layers=2", "model.vocab=100000")
    first, last = stage_flops(plan)
    assert last > 1.3 * first
    more = 0.5 * (last / first - 1)
    made = reading_of(plan, bubble_s=0.5, rank_spread_s=more, slowest_rank=4.0)
    assert straggler(made, plan) is None and bubble(made, plan) is not None
    slow = reading_of(plan, bubble_s=0.5, rank_spread_s=more + 0.4, slowest_rank=4.0)
    found, idle = straggler(slow, plan), bubble(slow, plan)
    assert found is not None and found.share == pytest.approx(0.4, abs=0.01)
    assert idle is not None and idle.share == pytest.approx(0.1, abs=0.01), "what is left of the idle time"


def test_too_few_micro_batches_leave_stages_idle() -> None:
    plan = plan_of("layout.pp=4", "layout.dp=2", "layout.micro_batch=8", "train.batch_tokens=65536")
    made = reading_of(plan, bubble_s=0.4)
    found = bubble(made, plan)
    assert found is not None and found.share == pytest.approx(0.4) and "2 micro-batches per step" in found.says
    assert bubble(reading_of(plan, bubble_s=0.02), plan) is None
    verdict = diagnose(made, NOWHERE)
    assert verdict.cause == "bubble" and verdict.levers[0].speedup > 1.1


def test_recompute_with_memory_to_spare() -> None:
    made = reading_of(plan_of("layout.recompute=full"))
    found = needless_recompute(made, made.plan)
    assert found is not None and 0.1 < found.share < 0.4
    verdict = diagnose(made, NOWHERE)
    assert verdict.cause == "needless_recompute" and verdict.levers[0].change == {"layout.recompute": "none"}
    assert 1.1 < verdict.levers[0].speedup < 1.5 and verdict.levers[0].risk.startswith("+")
    assert needless_recompute(made, plan_of()) is None


def test_recompute_that_is_needed_is_no_finding() -> None:
    plan = plan_of(
        "model.name=llama-2-7b",
        "layout.recompute=full",
        "layout.zero=3",
        "layout.micro_batch=8",
        "train.batch_tokens=262144",
        "train.sequence=4096",
    )
    made = reading_of(plan)
    assert needless_recompute(made, plan) is not None
    verdict = diagnose(made, NOWHERE)
    assert verdict.cause != "needless_recompute", "the lever does not fit, so it was not needless"


def test_offload_with_memory_to_spare() -> None:
    made = reading_of(plan_of("layout.offload=optimizer"), offload_s=0.3, offloaded_bytes=8e9)
    found = needless_offload(made, made.plan)
    assert found is not None and found.share == pytest.approx(0.3)
    verdict = diagnose(made, NOWHERE)
    assert verdict.cause == "needless_offload" and verdict.levers[0].change == {"layout.offload": "none"}
    assert verdict.levers[0].speedup == pytest.approx(1 / 0.7, rel=0.02), "what stood still goes"
    assert needless_offload(made, plan_of()) is None


def test_a_device_that_is_full() -> None:
    plan = plan_of("layout.micro_batch=16", "train.batch_tokens=262144")
    room = plan.cluster.chip.memory_bytes
    assert room is not None
    made = reading_of(plan, memory_peak_bytes=0.97 * room)
    found = memory_pressure(made, plan)
    assert found is not None and found.evidence[0].expected == room
    verdict = diagnose(made, NOWHERE)
    assert verdict.cause == "memory_pressure" and verdict.levers[0].of == "memory_peak_bytes"
    assert memory_pressure(reading_of(plan, memory_peak_bytes=0.5 * room), plan) is None


def test_experts_that_get_everything() -> None:
    moe = catalogue.model("mixtral-8x7b").config
    plan = replace(plan_of(), model=moe)
    made = reading_of(plan, expert_load_max_over_mean=3.8, expert_tail_fraction=0.7)
    found = expert_imbalance(made, plan)
    assert found is not None and found.share == pytest.approx(COLLAPSED_ROUTER_SHARE * 2.8 / 3), (
        "on one rank it costs weights"
    )
    over = replace(plan, layout=replace(plan.layout, ep=8))
    apart = expert_imbalance(reading_of(over, expert_load_max_over_mean=3.8), over)
    assert apart is not None and apart.share > 0.3
    part = expert_imbalance(reading_of(plan, expert_load_max_over_mean=2.6), plan)
    assert part is not None and part.share < 0.6 * found.share, "half of them still work"
    assert expert_imbalance(reading_of(plan, expert_load_max_over_mean=1.6, expert_tail_fraction=0.0), plan) is None
    begins = reading_of(plan, expert_load_max_over_mean=lambda step: 3.8 if step < 8 else 1.3)
    assert expert_imbalance(begins, plan) is None, "routers begin uneven"
    assert expert_imbalance(reading_of(), None) is None


def test_checkpoints_too_often() -> None:
    plan = plan_of("train.save_every=2")
    made = reading_of(plan, checkpoint_stall_s=lambda step: 1.0 if (step + 1) % 2 == 0 else None)
    found = checkpoint_stall(made, plan)
    assert found is not None and found.share == pytest.approx(1 / 3)
    lever = diagnose(made, NOWHERE).levers[0]
    assert lever.change == {"train.save_every": 100} and lever.speedup == pytest.approx(1.5 / 1.01, rel=0.01)
    assert checkpoint_stall(reading_of(plan, checkpoint_stall_s=0.01), plan) is None
    assert checkpoint_stall(made, None) is None


def test_validation_too_often() -> None:
    plan = plan_of("train.eval_every=4")
    made = reading_of(plan, validation_s=lambda step: 2.0 if (step + 1) % 4 == 0 else None)
    found = validation_stall(made, plan)
    assert found is not None and found.share == pytest.approx(1 / 3)
    assert "train.eval_every" in diagnose(made, NOWHERE).levers[0].change
    assert validation_stall(reading_of(plan), plan) is None
