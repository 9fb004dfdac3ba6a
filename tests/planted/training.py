"""Problems of the training loop: ranks that wait for each other, and work that need not be done."""

from __future__ import annotations

from pathlib import Path

from armillary.store.home import Home
from tests.planted.faults import Fault
from tests.planted.problem import ACTION, Problem, Wish
from tests.planted.train_small import LIBRARY, model_of, step_s, train_small

_EXPERTS = 8


def few_micro_batches(wish: Wish, home: Home) -> Path:
    """Two stages, and so few micro-batches that one of them mostly stands idle."""
    count = min((1, 2, 4, 8, 16), key=lambda one: abs(one - 2 / wish.severity))  # of 32 rows
    return train_small(wish, home, layout={"pp": 2, "micro_batch": 32 // count, "schedule": "1f1b"})


def slow_link(wish: Wish, home: Home) -> Path:
    """Heads and MLPs are cut over a link far slower than the ranks compute."""
    return train_small(
        wish,
        home,
        layout={"tp": 2, "micro_batch": 8},
        train={"batch_tokens": 2048, "steps": 16},
        fault=Fault(kind="slow link", amount=wish.severity),
    )


def uneven_machines(wish: Wish, home: Home) -> Path:
    """Groups of two ranks on machines of one and of three ranks."""
    return train_small(
        wish,
        home,
        layout={"tp": 2, "dp": 2, "micro_batch": 4},
        train={"batch_tokens": 2048, "steps": 16},
        fault=Fault(kind="uneven machines", amount=wish.severity),
    )


def slow_rank(wish: Wish, home: Home) -> Path:
    """One of two ranks takes longer for everything, and for longer than a busy machine holds one up."""
    return train_small(
        wish,
        home,
        layout={"dp": 2, "micro_batch": 16},
        train={"steps": 28},
        fault=Fault(kind="slow rank", amount=2.0 * wish.severity),
    )


def slow_stage(wish: Wish, home: Home) -> Path:
    """The second of two pipeline stages runs on a slow rank."""
    return train_small(
        wish,
        home,
        layout={"pp": 2, "micro_batch": 4, "schedule": "1f1b"},
        train={"steps": 28},
        fault=Fault(kind="slow rank", amount=2.5 * wish.severity),
    )


def slow_reader(wish: Wish, home: Home) -> Path:
    """One of two ranks reads from a store that is slower than its steps."""
    job, layout = {"steps": 28}, {"dp": 2, "micro_batch": 16}
    takes = (1 + wish.severity) * step_s(wish, home, train=job)
    return train_small(wish, home, layout=layout, train=job, fault=Fault(kind="slow reader", amount=takes))


def recompute(wish: Wish, home: Home) -> Path:
    """Activations are made again though there is room for them; less severe: in every second layer."""
    every = max(1, round(1 / wish.severity))
    return train_small(wish, home, layout={"recompute": "full", "recompute_every": every})


def offload(wish: Wish, home: Home) -> Path:
    """Optimiser states, or activations too, wait elsewhere though there is room."""
    what = "both" if wish.severity >= 1 else "activations"
    return train_small(wish, home, layout={"offload": what})


def expert_collapse(wish: Wish, home: Home) -> Path:
    """Routers have come to prefer one expert, and nothing holds against it."""
    moe = {"num_experts": _EXPERTS, "top_k": 1, "ffn": 96}
    mixture = {"family": "mixtral", "moe_every": 1, "ffn": 0, "moe": moe}
    return train_small(
        wish,
        home,
        model=model_of(wish.size, **mixture),
        train={"balance_loss": 0.0},
        fault=Fault(kind="collapsed router", amount=4.0 * wish.severity),
    )


def dropped_tokens(wish: Wish, home: Home) -> Path:
    """Experts take fewer tokens than a fair share, so that a good part passes them by."""
    moe = {"num_experts": _EXPERTS, "top_k": 1, "ffn": 96}
    mixture = {"family": "mixtral", "moe_every": 1, "ffn": 0, "moe": moe}
    capacity = round(max(0.25, 0.8 - 0.2 * wish.severity), 2)
    return train_small(wish, home, model=model_of(wish.size, **mixture), train={"expert_capacity": capacity})


def many_checkpoints(wish: Wish, home: Home) -> Path:
    """Everything is saved after every step, steps are short, and each waits for its checkpoint."""
    rows = max(2, round(8 / wish.severity))
    every = max(1, round(1 / wish.severity))
    job = {"save_every": every, "batch_tokens": 128 * rows, "checkpoint_async": False}
    return train_small(wish, home, layout={"micro_batch": rows}, train=job)


def many_validations(wish: Wish, home: Home) -> Path:
    """Held-out text is read again every few steps."""
    job = {"eval_every": max(1, round(2 / wish.severity)), "eval_batches": 4}
    return train_small(wish, home, data={"source": str(LIBRARY), "held_out": 0.25}, train=job)


PROBLEMS = (
    Problem(
        name="few-micro-batches",
        says="pp=2 with too few micro-batches",
        make=few_micro_batches,
        loop="training",
        causes=("bubble",),
        levers=("layout.micro_batch", "layout.pp"),
    ),
    Problem(
        name="slow-link",
        says="tp=2 over a slow link",
        make=slow_link,
        loop="training",
        causes=("exposed_communication",),
        levers=("layout.tp", "layout.dp", "layout.pp"),
    ),
    Problem(
        name="uneven-machines",
        says="tp=2 on machines of one and three ranks",
        make=uneven_machines,
        loop="training",
        causes=("bad_placement",),
        levers=(ACTION,),
    ),
    Problem(
        name="slow-rank",
        says="one of two ranks is slow",
        make=slow_rank,
        loop="training",
        causes=("straggler",),
        levers=(ACTION,),
    ),
    Problem(
        name="slow-stage",
        says="one pipeline stage on a slow rank",
        make=slow_stage,
        loop="training",
        causes=("straggler",),
        levers=(ACTION,),
    ),
    Problem(
        name="slow-reader",
        says="one of two ranks reads slowly",
        make=slow_reader,
        loop="training",
        causes=("straggler",),
        levers=(ACTION, "data.workers"),
    ),
    Problem(
        name="recompute",
        says="recompute with memory to spare",
        make=recompute,
        loop="training",
        causes=("needless_recompute",),
        levers=("layout.recompute",),
    ),
    Problem(
        name="offload",
        says="offload with memory to spare",
        make=offload,
        loop="training",
        causes=("needless_offload",),
        levers=("layout.offload",),
    ),
    Problem(
        name="expert-collapse",
        says="one expert gets nearly all tokens",
        make=expert_collapse,
        loop="training",
        causes=("expert_imbalance",),
        levers=("train.balance_loss", "train.expert_capacity", "train.bias_rate"),
    ),
    Problem(
        name="dropped-tokens",
        says="experts drop a third of the tokens",
        make=dropped_tokens,
        loop="training",
        causes=("dropped_tokens",),
        levers=("train.expert_capacity",),
    ),
    Problem(
        name="many-checkpoints",
        says="a checkpoint after every step",
        make=many_checkpoints,
        loop="training",
        causes=("checkpoint_stall",),
        levers=("train.save_every",),
    ),
    Problem(
        name="many-validations",
        says="a validation every other step",
        make=many_validations,
        loop="training",
        causes=("validation_stall",),
        levers=("train.eval_every", "train.eval_batches"),
    ),
)
