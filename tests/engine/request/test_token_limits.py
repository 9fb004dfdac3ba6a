"""Allowed tokens and bad words as constraints, without a model."""

from __future__ import annotations

import pytest

from armillary.engine.request.constraint import Constraint
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.token_limits import bad_tokens_of, limited
from armillary.errors import BadInput
from armillary.model.text.train_tokenizer import train_tokenizer

VOCAB = 70


class Even:
    """A structure of even tokens that is complete after a 6."""

    def __init__(self) -> None:
        self.last = 0

    def allowed(self) -> bytes:
        return bytes([0b01010101] * 9)

    def advance(self, token: int) -> bool:
        self.last = token
        return token % 2 == 0

    def finished(self) -> bool:
        return self.last == 6


def tokens(constraint: Constraint) -> set[int]:
    bits = constraint.allowed()
    assert len(bits) == 12  # whole words of 32 tokens
    return {token for token in range(96) if bits[token // 8] >> token % 8 & 1}


def test_only_what_is_allowed_may_come() -> None:
    maker = limited(SamplingParams(allowed_token_ids=(2, 3, 69)), VOCAB, None)
    assert maker is not None
    made = maker()
    assert tokens(made) == {2, 3, 69} and made.advance(3) and tokens(made) == {2, 3, 69} and not made.finished()


def test_the_last_token_of_a_bad_sequence_may_not_follow_the_others() -> None:
    maker = limited(SamplingParams(bad_tokens=((5,), (1, 2), (1, 2, 3), (1, 1))), VOCAB, None)
    assert maker is not None
    made, other, every = maker(), maker(), set(range(VOCAB))
    assert tokens(made) == every - {5}
    for token, banned in ((1, {5, 2, 1}), (4, {5}), (2, {5}), (1, {5, 2, 1}), (2, {5, 3})):
        assert made.advance(token) and tokens(made) == every - banned, token
    assert tokens(other) == every - {5}  # each answer has its own past


def test_a_structure_holds_as_well() -> None:
    maker = limited(SamplingParams(allowed_token_ids=(2, 3, 4, 6), bad_tokens=((4,),)), VOCAB, Even)
    assert maker is not None
    made = maker()
    assert tokens(made) == {2, 6} and not made.advance(3)
    assert made.advance(6) and made.finished()
    assert limited(SamplingParams(), VOCAB, Even) is Even and limited(SamplingParams(), VOCAB, None) is None


def test_words_become_tokens_with_and_without_a_space() -> None:
    tokenizer = train_tokenizer(["abra cadabra abra\n"] * 50, 300)
    found = bad_tokens_of(tokenizer, ("abra", "  abra", "x"))
    assert [tokenizer.decode(ids) for ids in found] == ["abra", " abra", "x"]


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(BadInput, match="leaves no token"):
        SamplingParams(allowed_token_ids=())
    with pytest.raises(BadInput, match="without a token"):
        SamplingParams(bad_tokens=((),))
    with pytest.raises(BadInput, match="allowed_token_ids has token 70 outside"):
        SamplingParams(allowed_token_ids=(70,)).check_vocab(VOCAB)
    with pytest.raises(BadInput, match="bad_tokens has token 70 outside"):
        SamplingParams(bad_tokens=((1, 70),)).check_vocab(VOCAB)
