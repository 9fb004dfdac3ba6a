"""Adapters on parts of fused matrices, cut and shared out: every layout learns what one process learns."""

from __future__ import annotations

import pytest

from armillary.spec.layout import Layout
from armillary.training.parity.case import Case, latent, many, tiny
from tests.parallel.test_strategies import check
from tests.ranks import Ranks

SOME = ("q", "v", "gate", "down")


def cases(*layouts: Layout) -> list[Case]:
    """Two queries to a key, so that a cut that went through a head's group would show."""
    config = tiny(kv_heads=4)
    return [Case(layout=x, config=config, dtype="fp64", steps=3, accumulate=2, lora=2, lora_on=SOME) for x in layouts]


def test_on_two_ranks(ranks: Ranks) -> None:
    wanted = cases(
        Layout(tp=2, sequence_parallel=True, precision="fp32", recompute="selective"),
        Layout(tp=2, sequence_parallel=False, precision="fp32"),
        Layout(dp=2, zero=2, precision="fp32", recompute="full"),
    )
    check(ranks.run(2, many, wanted)[0], wanted)


def test_latent_projections_on_two_ranks(ranks: Ranks) -> None:
    """Those to latents have whole adapters on every rank, those from latents cut ones."""
    layouts = [Layout(tp=2, sequence_parallel=tokens, precision="fp32") for tokens in (True, False)]
    wanted = [Case(layout=x, config=latent(), dtype="fp64", steps=2, lora=2, lora_on=("qkv", "out")) for x in layouts]
    check(ranks.run(2, many, wanted)[0], wanted)


@pytest.mark.slow
def test_on_four_ranks(ranks: Ranks) -> None:
    wanted = cases(
        Layout(dp=2, tp=2, zero=3, sequence_parallel=True, precision="fp32"),
        Layout(dp=4, zero=3, shard=2, precision="fp32"),
    )
    check(ranks.run(4, many, wanted)[0], wanted)
