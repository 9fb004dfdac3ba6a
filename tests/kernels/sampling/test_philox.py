"""Philox in plain torch gives the published words."""

from __future__ import annotations

import torch

from armillary.kernels.sampling.sampling import philox


def test_words_are_those_of_the_paper() -> None:
    """The known answer of Random123 for philox4x32 with ten rounds, of a zero counter and key."""
    words = [int(word) for word in philox(torch.tensor(0), torch.tensor([0]))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
