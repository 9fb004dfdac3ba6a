"""Healthy runs: nothing is planted, and a diagnosis must find nothing worth changing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from armillary.store.home import Home
from tests.planted.problem import Problem, Wish
from tests.planted.serve_small import rates, serve_small, serving_recipe
from tests.planted.traffic import at_rate, mixed
from tests.planted.train_small import model_of, train_small

_WIDE = 3
_LOAD = 0.4
"""of what the engine bears: queues stay short"""
_FULL = 0.85
"""the engine is always busy, and keeps up"""

_ROWS = 64


def one_rank(wish: Wish, home: Home) -> Path:
    """A model whose products are the time, in bf16, in one micro-batch."""
    return train_small(wish, home, model=model_of(_WIDE * wish.size), train={"batch_tokens": 2048, "steps": 14})


def two_ranks(wish: Wish, home: Home) -> Path:
    """The same over two ranks, with enough work between exchanges."""
    return train_small(
        wish,
        home,
        model=model_of(2 * wish.size),
        layout={"dp": 2, "micro_batch": 16},
        train={"batch_tokens": 8192, "steps": 12},
    )


def beside_a_busy_process(wish: Wish, home: Home) -> Path:
    """The same on one rank while another program computes on the machine."""
    with subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) as busy:
        try:
            return one_rank(wish, home)
        finally:
            busy.kill()


def moderate_load(wish: Wish, home: Home) -> Path:
    """Requests come at less than half of what the engine bears."""
    return _served(wish, home, _LOAD, 60)


def full_load(wish: Wish, home: Home) -> Path:
    """Requests come nearly as fast as the engine bears."""
    return _served(wish, home, _FULL, 120)


def _served(wish: Wish, home: Home, load: float, count: int) -> Path:
    requests = mixed(count, tokens_in=(32, 96), tokens_out=(24, 48), seed=wish.seed)
    wide = {"serve": {"max_running": _ROWS}}
    rate = min(rates(serving_recipe(wish, wide), requests[:_ROWS])) * load
    return serve_small(wish, home, at_rate(requests, rate, wish.seed), **wide)


PROBLEMS = (
    Problem(name="healthy-rank", says="one rank, well set", make=one_rank, loop=None),
    Problem(name="healthy-ranks", says="two ranks, well set", make=two_ranks, loop=None),
    Problem(name="healthy-busy", says="beside a busy process", make=beside_a_busy_process, loop=None, disturbed=True),
    Problem(name="healthy-load", says="an engine at moderate load", make=moderate_load, loop=None),
    Problem(name="healthy-full", says="an engine at full load", make=full_load, loop=None),
)
