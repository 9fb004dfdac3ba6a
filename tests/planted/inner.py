"""Problems of the inner loop: one device that waits, or works in small pieces or wide numbers."""

from __future__ import annotations

from pathlib import Path

from armillary.machine.features import has_native
from armillary.store.home import Home
from tests.planted.faults import Fault
from tests.planted.problem import ACTION, Problem, Wish
from tests.planted.train_small import model_of, step_s, train_small

_WIDE = 3
"""times the usual width: a model whose matrix products are the time"""


def slow_loader(wish: Wish, home: Home) -> Path:
    """A batch takes the store longer than a step takes to use it."""
    job = {"batch_tokens": 2048, "steps": 14}
    takes = (1 + 2 * wish.severity) * step_s(wish, home, train=job)
    return train_small(wish, home, train=job, fault=Fault(kind="slow source", amount=takes))


def tiny_operators(wish: Wish, home: Home) -> Path:
    """A narrow model fed one short row at a time: operators of microseconds."""
    rows = max(4, round(16 * wish.severity))
    return train_small(
        wish,
        home,
        model=model_of(wish.size / 4),
        layout={"micro_batch": 1},
        train={"sequence": 32, "batch_tokens": 32 * rows},
    )


def host_work(wish: Wish, home: Home) -> Path:
    """Python does something else after every block."""
    return train_small(wish, home, fault=Fault(kind="host work", amount=1.5 * wish.severity))


def logging_steps(wish: Wish, home: Home) -> Path:
    """After every step the loop prints and computes statistics for a log."""
    return train_small(wish, home, fault=Fault(kind="busy logging", amount=0.5 * wish.severity))


def emulated_numbers(wish: Wish, home: Home) -> Path:
    """Products in bf16 on a CPU without units for it; more of them the worse it is."""
    return train_small(
        wish,
        home,
        model=model_of(2 * wish.size * wish.severity**0.5),
        layout={"precision": "bf16"},
        train={"batch_tokens": 2048, "steps": 10},
    )


def wide_numbers(wish: Wish, home: Home) -> Path:
    """Products in fp32 on a chip with units for bf16; more of them the worse it is."""
    return train_small(
        wish,
        home,
        model=model_of(_WIDE * wish.size * wish.severity**0.5),
        layout={"precision": "fp32"},
        train={"batch_tokens": 2048, "steps": 12},
    )


PROBLEMS = (
    Problem(
        name="slow-loader",
        says="batches come too slowly",
        make=slow_loader,
        loop="inner",
        causes=("data_starvation",),
        levers=("data.workers",),
    ),
    Problem(
        name="tiny-operators",
        says="one short row at a time through a narrow model",
        make=tiny_operators,
        loop="inner",
        causes=("launch_overhead",),
        levers=("layout.micro_batch", "train.compile"),
    ),
    Problem(
        name="host-work",
        says="Python work inside every block",
        make=host_work,
        loop="inner",
        causes=("sync",),
        levers=(ACTION,),
    ),
    Problem(
        name="logging-steps",
        says="half a step of logging after each",
        make=logging_steps,
        loop="inner",
        causes=("sync",),
        levers=(ACTION,),
    ),
    Problem(
        name="wide-numbers",
        says="fp32 where bf16 is there",
        make=wide_numbers,
        loop="inner",
        causes=("precision",),
        levers=("layout.precision",),
    )
    if has_native("bf16")
    else Problem(
        name="emulated-numbers",
        says="bf16 on a CPU that emulates it",
        make=emulated_numbers,
        loop="inner",
        causes=("precision",),
        levers=("layout.precision",),
    ),
)
"""fp32 is a problem where the CPU has units for bf16, and bf16 where it has none"""
