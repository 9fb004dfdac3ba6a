"""Steps with draft tokens give the tokens that steps without give: through blocks, windows, forks and preemption."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.output.output_text import OutputProcessor
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.step_loop import Loop
from armillary.engine.speculative.draft import DraftState
from armillary.engine.speculative.draft_length import Candidate, LengthController
from armillary.engine.speculative.speculation import Speculation
from armillary.engine.speculative.step_costs import StepCosts
from tests.engine.fake import VOCAB, FakeExecutor, ask, expected, make_scheduler, run

MIXED = (Group(), Group(sees="window", reach=6))


class AnyLength(LengthController):
    """Random lengths."""

    def __init__(self, rng: Random) -> None:
        super().__init__(StepCosts({1: 1.0}), None, 6)
        self._rng = rng

    def lengths(self, decodes: int, candidates: list[Candidate], room: int) -> list[int]:
        drawn = []
        for each in candidates:
            drawn.append(self._rng.randint(0, min(each.most, room)))
            room -= drawn[-1]
        return drawn


class Oracle(Speculation):
    """Proposes the right tokens, most of the time."""

    rng: Random
    groups: Any = FULL_ATTENTION

    def _look_up(self, decision: Decision, sequences: list[Sequence]) -> None:
        for seq in dict.fromkeys(sequences):
            right = expected(seq.request, seq.index, self.groups)[seq.num_output :][:6]
            seq.draft = seq.draft or DraftState()
            seq.draft.proposed_at = len(seq.tokens)
            seq.draft.proposal = [t if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for t in right]
        self.active = self.rng.random() < 0.8

    def _decide(self, decision: Decision) -> None: ...


def with_oracle(scheduler: Scheduler, seed: int, groups: Any = FULL_ATTENTION) -> Oracle:
    rng = Random(seed)
    made = Oracle(AnyLength(rng), scheduler.cache, has_model=False, max_rows=12, max_len=64, totals=scheduler.totals)
    made.rng, made.groups = rng, groups
    scheduler.speculation = made
    return made


requests = st.lists(
    st.tuples(st.lists(st.integers(2, 9), min_size=1, max_size=14), st.integers(1, 14), st.integers(1, 2)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    wanted=requests,
    groups=st.sampled_from([FULL_ATTENTION, MIXED]),
    spare=st.integers(0, 12),
    prefix=st.booleans(),
    overlap=st.booleans(),
    num_stages=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_answers_are_those_without_drafts(
    wanted: list[tuple[list[int], int, int]],
    groups: Any,
    spare: int,
    prefix: bool,
    overlap: bool,
    num_stages: int,
    seed: int,
) -> None:
    made = [ask(f"r{i}", prompt, most, n=n) for i, (prompt, most, n) in enumerate(wanted)]
    scheduler = make_scheduler(num_blocks=10 * len(groups) + spare, groups=groups, prefix=prefix, num_stages=num_stages)
    with_oracle(scheduler, seed, groups)
    answers = run(scheduler, made, overlap=overlap)
    for request in made:
        names = [request.id] if request.params.n == 1 else [f"{request.id}/{i}" for i in range(request.params.n)]
        assert [answers[name] for name in names] == [expected(request, i, groups) for i in range(len(names))]


def test_accepted_drafts_take_fewer_steps() -> None:
    request = ask("r", [3, 4, 5], 40, ignore_eos=True)
    steps = []
    for drafts in (False, True):
        scheduler = make_scheduler(num_blocks=24)
        if drafts:
            made = with_oracle(scheduler, 0)
            made.rng.random = lambda: 0.0  # type: ignore[method-assign]
        run(scheduler, [request])
        steps.append(scheduler.totals.steps)
    assert steps[1] < steps[0] / 2
    assert scheduler.totals.drafted >= scheduler.totals.accepted > 20


class Letters:
    """Each token is a letter."""

    def push(self, token: int) -> str:
        return chr(ord("A") + token)

    def finish(self) -> str:
        return ""


def test_a_stop_string_among_accepted_tokens_ends_the_output_there() -> None:
    request = ask("r", [3, 4, 5], 30, ignore_eos=True)
    right = [chr(ord("A") + token) for token in expected(request, eos=None)]
    stop = "".join(right[8:10])
    at = "".join(right).find(stop)
    request = ask("r", [3, 4, 5], 30, ignore_eos=True, stop=(stop,))
    for seed in range(8):
        scheduler = make_scheduler(num_blocks=24)
        with_oracle(scheduler, seed)
        processor = OutputProcessor(scheduler, Letters)
        loop = Loop(scheduler, FakeExecutor(scheduler.cache, 4), clock=lambda: 0.0)
        (seq,) = scheduler.submit(request, 0.0)
        deltas = []
        while scheduler.has_work or scheduler.under_way:
            decision, outcome = loop.step()
            deltas += processor.take(decision, outcome, 0.0)
        assert "".join(delta.text for delta in deltas) == "".join(right)[:at]
        assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
        assert [token for delta in deltas for token in delta.tokens] == seq.output


def test_structures_have_no_drafts() -> None:
    scheduler = make_scheduler(num_blocks=24)
    with_oracle(scheduler, 0)
    run(scheduler, [ask("r", [3, 4, 5], 20, allowed_token_ids=tuple(range(VOCAB)))])
    assert scheduler.totals.drafted == 0
