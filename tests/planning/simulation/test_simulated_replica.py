"""A replica that plans stretches of decodes does what one does that runs every step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from armillary.engine.scheduler.settings import Settings
from armillary.planning.simulation.replayed_requests import Arrival, Prompts
from armillary.planning.simulation.simulated_engine import System, simulate
from armillary.planning.simulation.simulated_replica import Served, SimulatedReplica
from armillary.planning.simulation.step_cost import StepCost, step_noise

COST = StepCost(base_s=0.004, prefill_s=2e-5, decode_s=3e-5, context_s=2e-8, prompt_s=0.001)
SYSTEM = System(settings=Settings(max_model_len=2048, vocab=100, max_running=16), num_blocks=900, streamed=True)


def requests(count: int = 60, seed: int = 0) -> list[Arrival]:
    """Some at once, some alone, some with the prompt of an earlier one."""
    dice, at, made = Random(seed), 0.0, []
    for number in range(1, count + 1):
        at += dice.choice([0.0, 0.02, 0.3, 1.5]) * dice.random()
        out, source = dice.randint(1, 120), dice.randint(0, number - 1) if dice.random() < 0.4 else 0
        shared = 48 if source else 0
        made.append(
            Arrival(
                number=number,
                at_s=at,
                tokens_in=dice.randint(50, 400),
                tokens_out=out,
                limit=out + dice.choice([0, 0, 50]),
                shared_prefix=shared,
                prefix_source=source,
            )
        )
    return made


def run(
    system: System, cost: StepCost, arrivals: list[Arrival], *, stretches: bool
) -> tuple[list[Served], list[float]]:
    replica, prompts = SimulatedReplica("one", system, cost, stretches=stretches), Prompts(arrivals)
    over: list[Served] = []
    for arrival in arrivals:
        over += replica.advance(arrival.at_s)
        assert replica.submit(arrival, prompts.of(arrival), arrival.at_s)
    over += replica.advance(1e9)
    assert replica.in_flight == 0 and replica.scheduler.cache.used_fraction == 0.0
    gaps = [gap for gap, weight in zip(replica.gaps, replica.gap_weights, strict=True) for _ in range(weight)]
    return sorted(over), gaps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("system", "cost"),
    [
        (SYSTEM, replace(COST, waits=True)),
        (replace(SYSTEM, overlap=False), COST),
        (replace(SYSTEM, num_blocks=160), replace(COST, waits=True)),
        (replace(SYSTEM, prefix=False, streamed=False), replace(COST, waits=True)),
    ],
    ids=["gpu", "cpu", "little cache", "no prefixes"],
)
def test_stretches_change_nothing(system: System, cost: StepCost, seed: int) -> None:
    arrivals = requests(seed=seed)
    fast, slow = (run(system, cost, arrivals, stretches=stretches) for stretches in (True, False))
    assert len(fast[0]) == len(arrivals)
    for quick, reference in zip(fast[0], slow[0], strict=True):
        assert quick[:9] == reference[:9]  # times to the bit
    assert fast[1] == slow[1]


def state(replica: SimulatedReplica) -> list[object]:
    """Everything of a replica's scheduler that its next steps depend on, but for the blocks that it has allocated
    ahead."""
    scheduler, controller = replica.scheduler, replica.scheduler.prefill.controller
    assert controller is not None
    running = [
        (seq.number, seq.computed, seq.num_visible, seq.is_prefilling, seq.tokens)
        for seq in scheduler.request_table.running
    ]
    steps = [
        (step.number, step.decided_at, step.positions, step.rows, [chunk[1:] for chunk in step.chunks])
        for step in scheduler.under_way
    ]
    return [replica.device.now, replica.num_steps, running, steps, scheduler.totals, controller.most]


@pytest.mark.parametrize("answers", [(300, 300), (40, 60)], ids=["by limit", "by end token"])
def test_a_prefill_stretch_leaves_the_scheduler_as_its_steps_do(answers: tuple[int, int]) -> None:
    """Two long prompts beside decodes, looked at in the midst of them; with long answers most of the steps are in
    stretches."""
    system = replace(SYSTEM, settings=replace(SYSTEM.settings, attention_tokens=3000.0, query_tile=32), prefix=False)
    least, most = answers
    arrivals = [
        Arrival(number=i + 1, at_s=at, tokens_in=tokens, tokens_out=out, limit=most)
        for i, (at, tokens, out) in enumerate(
            [(0.0, 20, least), (0.0, 30, most), (0.1, 1500, least), (0.1, 1400, least)]
        )
    ]
    fast, slow = (
        SimulatedReplica("one", system, replace(COST, waits=True), stretches=stretches) for stretches in (True, False)
    )
    single_steps = 0
    step = fast._step

    def counted() -> None:
        nonlocal single_steps
        single_steps += 1
        step()

    fast._step = counted  # type: ignore[method-assign]
    prompts = Prompts(arrivals)
    for replica in (fast, slow):
        for arrival in arrivals:
            replica.advance(arrival.at_s)
            assert replica.submit(arrival, prompts.of(arrival), arrival.at_s)
    for at in (0.12, 0.15, 0.16, 0.2, 0.25, 0.3, 0.4):
        for replica in (fast, slow):
            replica.advance(at)
            replica.end_stretch()
        if not fast._steps:  # a decode stretch is planned further
            assert state(fast) == state(slow)
    assert least < 300 or single_steps < fast.num_steps // 2


def test_it_serves_as_the_whole_engine_does() -> None:
    """The same requests through `Engine` with its output and records."""
    arrivals = requests()
    system, cost = replace(SYSTEM, overlap=False), COST
    engine = {int(each["request_number"]): each for each in simulate(arrivals, system, cost).requests}
    for served in run(system, cost, arrivals, stretches=True)[0]:
        record = engine[served.number]
        assert served.first_s - served.arrived_s == pytest.approx(record["ttft_s"])
        assert served.end_s - served.arrived_s == pytest.approx(record["e2e_s"])
        assert served.tokens_out == record["tokens_out"]


def test_noise_is_sampled_for_each_step_of_a_stretch() -> None:
    noise = step_noise((False, 0.0041, ratio) for ratio in (0.9, 1.0, 1.1, 1.4) for _ in range(3))
    arrivals = [Arrival(number=1, at_s=0.0, tokens_in=32, tokens_out=400, limit=400)]
    _, gaps = run(SYSTEM, replace(COST, waits=True, noise=noise), arrivals, stretches=True)
    plain = run(SYSTEM, replace(COST, waits=True), arrivals, stretches=True)[1]
    assert len(set(gaps)) > 100 and sum(gaps) / sum(plain) == pytest.approx(1.1, rel=0.05)


def test_a_request_that_comes_within_a_stretch_starts_with_the_next_step() -> None:
    system, cost = replace(SYSTEM, overlap=False), StepCost(base_s=0.01)
    long = Arrival(number=1, at_s=0.0, tokens_in=16, tokens_out=500, limit=500)
    late = Arrival(number=2, at_s=1.0034, tokens_in=16, tokens_out=1, limit=1)
    served, _ = run(system, cost, [long, late], stretches=True)
    found = next(each for each in served if each.number == 2)
    assert found.first_s == pytest.approx(1.02)  # the step under way ends at 1.01
