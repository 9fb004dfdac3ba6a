"""Steps with prompts last at most so many times what decodes take alone, on devices that nobody described."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadRecipe
from armillary.serving.engine.pace import Pace
from armillary.spec.job import Serve
from tests.serving.engine.fake import ask, make_scheduler


class Device:
    """Weights are read or tokens computed, whichever takes longer; attention comes on top, in tiles of 32 queries."""

    def __init__(self, read_s: float, token_s: float, pair_s: float, noise: float = 0.0) -> None:
        self.read_s, self.token_s, self.pair_s, self.noise = read_s, token_s, pair_s, noise
        self.dice = random.Random(1)

    def seconds(self, decodes: int, chunks: list[tuple[int, int]]) -> float:
        tokens = decodes + sum(size for _, size in chunks)
        pairs = sum(-(-size // 32) * 32 * (start + size / 2) for start, size in chunks)
        exact = max(self.read_s, self.token_s * tokens) + 0.1 * self.read_s * bool(chunks) + self.pair_s * pairs
        return exact * (1 + self.dice.gauss(0, self.noise))


def gaps(device: Device, slowdown: float, prompts: int = 2) -> tuple[list[float], float]:
    """Step times over those of decodes alone, and prompt tokens a second, with long prompts one after the other."""
    scheduler = make_scheduler(num_blocks=6000, max_model_len=20_000, max_tokens_per_step=4096, max_running=8,
                               attention_tokens=10_000.0, query_tile=32, block_tokens=16,
                               prefill_slowdown=slowdown, check_every=0)  # fmt: skip
    now, found, busy = 0.0, [], 0.0
    for i in range(4):
        scheduler.submit(ask(f"s{i}", [2 + i, 3, 4, 5], 15_000), now)
    for turn in range(24 + prompts * 4000):
        if turn == 24:
            for i in range(prompts):
                scheduler.submit(ask(f"long{i}", [2 + (i + j) % 40 for j in range(16_000)], 1), now)
        decision = scheduler.schedule(now)
        took = device.seconds(len(decision.decodes), [(chunk.start, chunk.size) for chunk in decision.chunks])
        now += took
        scheduler.update(decision, [3] * len(decision.sampling), now)
        if turn >= 24:
            found.append(took / device.seconds(4, []))
            busy += took
            if not any(name.startswith("long") for name in scheduler.roster.requests):
                return found, prompts * 16_000 / busy
    raise AssertionError("prompts make no progress")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.floats(1e-3, 2e-2), st.floats(1e-6, 1e-4), st.floats(1e-10, 8e-9), st.sampled_from([1.5, 2.0, 3.0]))
def test_steps_keep_the_pace(read_s: float, token_s: float, pair_s: float, slowdown: float) -> None:
    found, _ = gaps(Device(read_s, token_s, pair_s, noise=0.005), slowdown)
    ordered = sorted(found)
    least = 1.1 + 32 * (token_s + 16_000 * pair_s) / read_s  # what the smallest part takes
    assert ordered[int(0.99 * len(ordered))] <= max(slowdown * 1.02, least * 1.05)


def test_most_of_the_time_is_used() -> None:
    device = Device(5e-3, 2e-5, 2e-9)
    found, rate = gaps(device, 2.0)
    assert 1.75 < sorted(found)[len(found) // 2] < 2.0
    slow, least = gaps(device, 1.3)
    assert sorted(slow)[len(slow) // 2] < 1.3 and rate > 2.5 * least


def test_decodes_are_seen_alone_first_and_now_and_then() -> None:
    pace = Pace(2.0, None)
    assert pace.allowance(4) == (0.0, None)


def test_a_slowdown_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(BadRecipe, match="above 1"):
        Serve(prefill_slowdown=1.0)
