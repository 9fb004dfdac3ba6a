"""Prompt lookup against a search through all tokens."""

from hypothesis import given
from hypothesis import strategies as st

from armillary.engine.speculative.prompt_lookup import SIZES, PromptLookup


def searched(tokens: list[int]) -> int | None:
    """End of the last earlier occurrence of the last tokens."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                return end
    return None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 9))
def test_the_last_occurrence_is_continued_as_the_tokens_grow(tokens: list[int], most: int) -> None:
    lookup = PromptLookup()
    for size in range(1, len(tokens) + 1, 2):
        seen = tokens[:size]
        end, found = searched(seen), lookup.propose(seen, most)
        if end is None:
            assert found == []
        else:
            assert found[: size - end] == seen[end : end + most] and len(found) == most


def test_a_repetition_goes_on_beyond_its_end() -> None:
    assert PromptLookup().propose([7, 1, 2, 3, 1, 2, 3, 1, 2], 5) == [3, 1, 2, 3, 1]
    assert PromptLookup().propose([5, 5, 5], 4) == [5, 5, 5, 5]
