"""Names for runs."""

from __future__ import annotations

import random
import re

from armillary.store.runs import ADJECTIVES, ANIMALS, new_name


def test_a_name_can_be_said_aloud() -> None:
    assert re.fullmatch("[a-z]+-[a-z]+", new_name(set()))


def test_words_are_not_listed_twice() -> None:
    for words in (ADJECTIVES.split(), ANIMALS.split()):
        assert len(set(words)) == len(words) == 64


def test_names_taken_are_not_given_again() -> None:
    every = {f"{adjective}-{animal}" for adjective in ADJECTIVES.split() for animal in ANIMALS.split()}
    assert new_name(every - {"quiet-otter"}) not in every - {"quiet-otter"}
    assert re.fullmatch("[a-z]+-[a-z]+-2", new_name(every))


def test_seeding_pythons_generator_does_not_repeat_names() -> None:
    drawn = set()
    for _ in range(20):
        random.seed(0)
        drawn.add(new_name(set()))
    assert len(drawn) > 1
