"""Impossible wishes are refused in one sentence, possible ones are not."""

from __future__ import annotations

from typing import Any

import pytest

from armillary.engine.request.constraint import Structure
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0 must be a whole number of at least 1"),
    ({"n": 2.0}, "n=2.0 must be a whole number"),
    ({"n": True}, "n=True must be a whole number"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 exceeds max_tokens=8"),
    ({"temperature": -0.1}, "temperature=-0.1 must be from 0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_p": 0.0}, "top_p=0 leaves no token"),
    ({"top_p": 1.1}, "top_p=1.1 must be from 0 to 1"),
    ({"top_k": -1}, "top_k=-1"),
    ({"min_p": 2}, "min_p=2 must be from 0 to 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0 divides by nothing"),
    ({"presence_penalty": 3.0}, "presence_penalty=3.0 must be from -2 to 2"),
    ({"frequency_penalty": -3.0}, "frequency_penalty=-3.0"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 2**62}, "seed="),
    ({"stop": ("",)}, "a stop text is empty"),
    ({"stop": (5,)}, "stop=(5,) must be texts; give tokens as stop_ids"),
    ({"stop": 5}, "stop=5 must be a list"),
    ({"stop_ids": 5}, "stop_ids=5 must be a list"),
    ({"stop_ids": "ab"}, "stop_ids='ab' must be a list"),
    ({"logit_bias": [1]}, "logit_bias=[1] must map tokens to numbers"),
    ({"structure": "json"}, "structure='json' must be a Structure"),
    ({"logprobs": 101}, "logprobs=101 must be a whole number of at least 0 and at most 100"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias has a value that is no finite number"),
]


@pytest.mark.parametrize(("given", "words"), BAD)
def test_impossible_wishes(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        SamplingParams(**given)
    text = str(caught.value)
    assert words in text and "\n" not in text and not text.endswith(".")


def test_possible_ones() -> None:
    SamplingParams(n=4, temperature=0, top_k=5, top_p=1, min_p=0.1, seed=0, stop=("\n",), logit_bias={3: -100.0})
    params = SamplingParams(stop_ids=(3, 4), structure=Structure(kind="json"))
    params.check_vocab(5)
    with pytest.raises(BadInput, match="stop_ids has token 4 outside the vocabulary of 4"):
        params.check_vocab(4)


def test_one_stop_text_needs_no_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_a_bias_that_rules_everything_out() -> None:
    with pytest.raises(BadInput, match="rules every token out"):
        SamplingParams(logit_bias=dict.fromkeys(range(5), -100.0)).check_vocab(5)


def test_structures_need_a_source() -> None:
    with pytest.raises(BadInput, match="needs its source"):
        Structure(kind="regex")
    with pytest.raises(BadInput, match="no structure 'xml'"):
        Structure(kind="xml")  # type: ignore[arg-type]
