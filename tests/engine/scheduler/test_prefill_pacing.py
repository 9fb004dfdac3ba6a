"""Steps with prompts last at most so many times what decodes take alone, on devices that nobody described."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armillary.engine.engine import Engine
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import OutputProcessor
from armillary.engine.scheduler.decision import Decision, PrefillChunk
from armillary.engine.scheduler.prefill_budget import Budget
from armillary.engine.scheduler.prefill_pacing import PrefillController
from armillary.engine.scheduler.step_loop import Loop
from armillary.errors import BadRecipe
from armillary.spec.tables.serve import Serve
from tests.engine.fake import FakeExecutor, ask, make_scheduler
from tests.engine.output.test_output_text import Letters


class Device:
    """Weights are read or tokens computed, whichever takes longer; attention comes on top, in tiles of 32 queries."""

    def __init__(self, read_s: float, token_s: float, pair_s: float, noise: float = 0.0, jump: int = 0) -> None:
        self.read_s, self.token_s, self.pair_s, self.noise, self.jump = read_s, token_s, pair_s, noise, jump
        self.dice = random.Random(1)

    def seconds(self, decodes: int, chunks: list[tuple[int, int]]) -> float:
        tokens = decodes + sum(size for _, size in chunks)
        pairs = sum(-(-size // 32) * 32 * (start + size / 2) for start, size in chunks)
        exact = max(self.read_s, self.token_s * tokens) + 0.1 * self.read_s * bool(chunks) + self.pair_s * pairs
        if self.jump and tokens > self.jump:  # products that are padded to the next size
            exact += 0.35 * self.read_s
        return exact * (1 + self.dice.gauss(0, self.noise))


def paced(
    device: Device, slowdown: float, prompts: int = 2, length: int = 12_000, held_up: int = -1
) -> tuple[list[float], float]:
    """Step times over those of decodes alone, and prompt tokens a second, with long prompts one after the other; step
    `held_up` takes 80 ms longer."""
    pace, alone, now, found = PrefillController(slowdown, 10_000.0, 32), device.seconds(4, []), 0.0, []
    for _ in range(9):
        now += alone
        pace.took(decided([]), now - alone, now)
    begin = now
    for past in [0] * prompts:
        while past < length:
            tokens, attention_tokens = pace.allowance(4)
            budget = Budget(tokens=tokens, most=pace.most, attention_tokens=attention_tokens, free=0.0, least=32)
            size = 0 if budget.spent else budget.size(length - past, past, 16, 32)
            if 0 < size < length - past:
                size = pace.size(4, size, past, min(budget.most, length - past - 1))
            took = device.seconds(4, [(past, size)] if size else []) + 0.08 * (len(found) == held_up)
            now += took
            pace.took(decided([(past, size)] if size else []), now - took, now)
            found.append(took / alone)
            past += size
    return found, prompts * length / (now - begin)


SEQUENCE = make_scheduler().submit(ask("a", [2], 1), 0.0)[0]


def decided(chunks: list[tuple[int, int]], rows: int = 4) -> Decision:
    decision = Decision(1)
    decision.decodes = [SEQUENCE] * rows
    decision.chunks = [PrefillChunk(SEQUENCE, 0, start, size, False) for start, size in chunks]
    return decision


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(1e-3, 2e-2), st.floats(1e-6, 1e-4), st.floats(1e-10, 8e-9), st.sampled_from([1.5, 2.0, 3.0]))
def test_steps_keep_the_pace(read_s: float, token_s: float, pair_s: float, slowdown: float) -> None:
    found, _ = paced(Device(read_s, token_s, pair_s, noise=0.005), slowdown)
    least = 1.1 + 36 * token_s / read_s + 32 * 12_000 * pair_s / read_s  # what the smallest part takes
    late = sum(gap > 1.05 * max(slowdown, least) for gap in found)
    # A few while it learns where reading ends and computing begins, and again where attention is nearly all of a step.
    assert late <= 4 + 0.03 * len(found)


def test_most_of_the_time_is_used() -> None:
    device = Device(5e-3, 2e-5, 1e-9)
    found, rate = paced(device, 2.0)
    assert 1.7 < sorted(found)[len(found) // 2] < 2.0
    slow, least = paced(device, 1.3)
    assert sorted(slow)[len(slow) // 2] < 1.3 and rate > 2 * least


def test_what_a_size_took_counts_more_than_a_line() -> None:
    """An H200's steps with 32 streams: 2 ms more from 193 tokens on. A line through both sides tries the wrong sizes
    again and again."""
    device = Device(6e-3, 8e-6, 1.2e-9, noise=0.006, jump=192)
    found, _ = paced(device, 2.0, prompts=3, length=32_000)
    assert sorted(found)[int(0.985 * len(found))] <= 2.03 and sorted(found)[len(found) // 2] > 1.75


@pytest.mark.parametrize("held_up", [5, 30, 60])
def test_one_step_that_was_held_up_says_nothing(held_up: int) -> None:
    device = Device(5e-3, 2e-5, 2e-10, noise=0.005)
    usual, hindered = (paced(device, 2.0, length=32_000, held_up=at)[1] for at in (-1, held_up))
    assert hindered > 0.9 * usual


def test_sizes_are_known_by_all_tokens_of_a_step() -> None:
    """40 streams and 216 tokens fill 256; with 41 the products are padded to the next size."""
    pace = PrefillController(2.0, None, 8)
    for rows in (40, 41):
        for now in range(9):
            pace.took(decided([], rows), 0.01 * now, 0.01 * (now + 1))
    pace.allowance(40)
    for rows, seconds in ((40, 0.015), (41, 0.025)):
        pace._last_s = 0.0
        pace.took(decided([(0, 216)], rows), 0.0, seconds)
    assert pace.size(40, 216, 0, 216) == 216 and pace.size(41, 216, 0, 216) < 216


def test_a_waiter_is_served_behind_a_long_prompt_where_it_ends() -> None:
    """What the long prompt leaves over of a step goes to one that ends with it, and never begins another long one."""
    device, now, parts = Device(5e-3, 2e-5, 2e-9), 0.0, []
    scheduler = make_scheduler(
        num_blocks=600,
        max_model_len=4000,
        max_tokens_per_step=2048,
        block_tokens=16,
        query_tile=32,
        prefill_slowdown=2.0,
        check_every=1,
    )
    scheduler.submit(ask("stream", [2, 3, 4], 900), now)
    for turn in range(60):
        if turn == 5:
            for name, length in (("long", 3000), ("also long", 2999), ("short", 4)):
                scheduler.submit(ask(name, [2 + (j + length) % 40 for j in range(length)], 1), now)
        decision = scheduler.schedule(now)
        now += device.seconds(len(decision.decodes), [(chunk.start, chunk.size) for chunk in decision.chunks])
        scheduler.update(decision, [3] * len(decision.sampling), now)
        parts.append([(chunk.sequence.request.id, chunk.samples) for chunk in decision.chunks])
    assert all(ends for step in parts for _, ends in step[1:])
    firsts = [step[0][0] for step in parts if step]
    assert firsts.index("also long") > max(i for i, name in enumerate(firsts) if name == "long")


def test_behind_the_first_part_prompts_are_not_begun_unless_they_end() -> None:
    budget = Budget(tokens=170.0, most=500, attention_tokens=None, least=32, one_partial=True)
    assert budget.size(900, 0, 16, 32) == 160
    budget.pay(160, 0)
    assert budget.size(5, 0, 16, 32) == 5
    assert budget.size(900, 0, 16, 32) == 0
    assert Budget(tokens=3.0, most=500, attention_tokens=None, least=32).size(900, 0, 16, 32) == 32  # someone begins


def test_a_scheduler_with_a_pace_gives_decodes_their_time() -> None:
    device, now, sizes, slow = Device(5e-3, 2e-5, 2e-9), 0.0, [], 0
    scheduler = make_scheduler(
        num_blocks=400,
        max_model_len=4000,
        max_tokens_per_step=2048,
        block_tokens=16,
        query_tile=32,
        prefill_slowdown=2.0,
        check_every=50,
    )
    scheduler.submit(ask("stream", [2, 3, 4], 900), now)
    for turn in range(200):
        if turn == 5:
            scheduler.submit(ask("long", [2 + j % 40 for j in range(3000)], 1), now)
        decision = scheduler.schedule(now)
        took = device.seconds(len(decision.decodes), [(chunk.start, chunk.size) for chunk in decision.chunks])
        now += took
        scheduler.update(decision, [3] * len(decision.sampling), now)
        if decision.decodes:
            sizes += [chunk.size for chunk in decision.chunks]
            slow += took > 2.0 * 5e-3
        if "long" not in scheduler.request_table.requests and turn > 5:
            break
    assert sum(sizes) == 3000 and sizes[0] == 64 and max(sizes) > 150 and slow <= 1  # it begins carefully


def test_decodes_are_seen_alone_first_and_now_and_then() -> None:
    pace = PrefillController(2.0, None)
    assert pace.allowance(4) == (0.0, None)


def test_a_slowdown_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(BadRecipe, match="above 1"):
        Serve(prefill_slowdown=1.0)


def longest_step(scheduler: Any) -> float:
    """A stream beside a long prompt: the longest step it is held up by, over one without prompts."""
    device, now, longest = Device(5e-3, 2e-5, 2e-9), 0.0, 0.0
    scheduler.submit(ask("stream", [2, 3, 4], 900), now)
    for turn in range(200):
        if turn == 5:
            scheduler.submit(ask("long", [2 + j % 40 for j in range(3000)], 1), now)
        decision = scheduler.schedule(now)
        took = device.seconds(len(decision.decodes), [(chunk.start, chunk.size) for chunk in decision.chunks])
        now += took
        scheduler.update(decision, [3] * len(decision.sampling), now)
        longest = max(longest, took) if turn >= 5 else 0.0
    return longest / device.seconds(1, [])


SIZES: dict[str, Any] = {
    "num_blocks": 400,
    "max_model_len": 4000,
    "max_tokens_per_step": 2048,
    "block_tokens": 16,
    "query_tile": 32,
    "check_every": 50,
}


def test_whoever_reads_along_is_paced_unless_something_else_was_chosen() -> None:
    batch, streamed, chosen, fixed = (
        make_scheduler(**SIZES),
        make_scheduler(**SIZES),
        make_scheduler(**SIZES, prefill_slowdown=4.0),
        make_scheduler(**SIZES, prefill_tokens=512),
    )
    for scheduler in (streamed, chosen, fixed):
        scheduler.prefill.stream()
    assert longest_step(batch) > 8, "a batch is not held back"
    assert longest_step(streamed) < 2.3, "the first step with prompts is a guess"
    assert (
        chosen.prefill.controller is not None
        and chosen.prefill.controller.slowdown == 4.0
        and fixed.prefill.controller is None
    )


@pytest.mark.parametrize(("waiting", "paced"), [(3, True), (4, True), (5, False), (40, False)])
def test_the_default_gives_way_where_more_wait_than_decode(waiting: int, paced: bool) -> None:
    scheduler = make_scheduler(**SIZES | {"max_running": 64})
    scheduler.prefill.stream()
    for i in range(4):
        scheduler.submit(ask(f"stream {i}", [2, 3, 4 + i], 900, ignore_eos=True), 0.0)
    now = 0.0
    for _ in range(6):
        decision = scheduler.schedule(now)
        now += 5e-3
        scheduler.update(decision, [3] * len(decision.sampling), now)
    for i in range(waiting):
        scheduler.submit(ask(f"r{i}", [5 + i % 20] * 90, 4), now)
    decision = scheduler.schedule(now)
    assert len(decision.decodes) == 4
    assert decision.num_prefill_tokens <= 64 if paced else decision.num_prefill_tokens == min(90 * waiting, 2048 - 4)


def test_a_worker_streams_and_generate_does_not() -> None:
    scheduler = make_scheduler()
    engine = Engine(Loop(scheduler, FakeExecutor(scheduler.cache, 4)), OutputProcessor(scheduler, Letters))
    engine.generate([ask("a", [2, 3], 4)])
    assert scheduler.prefill.controller is None
    worker = EngineThread(engine).start()
    worker.stop()
    assert scheduler.prefill.controller is not None and scheduler.prefill.controller.slowdown == 2.0
