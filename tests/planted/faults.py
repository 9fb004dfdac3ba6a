"""Faults that no setting brings: a slow store, host work or a wait in every block, one slow rank, a slow link.

Each is put around a part of the trainer for as long as a run lasts. Amounts are relative to what the part takes by
itself where they can be, so that a fault weighs the same whatever the size of the model and the speed of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.planted.slow_source import SlowSource


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and how badly."""

    kind: str
    """a key of KINDS"""
    amount: float
    """in the kind's own unit"""


def planted(fault: Fault | None) -> AbstractContextManager[Any]:
    """With the fault, or without one."""
    return mock.patch.dict({}) if fault is None else KINDS[fault.kind](fault.amount)


def slow_source(seconds: float) -> AbstractContextManager[Any]:
    """Every batch comes from a store that takes so long; several readers wait side by side."""
    from armillary.training import trainer

    opened = trainer.open_text

    def open_slowly(plan: Any) -> Any:
        text = opened(plan)
        return replace(text, train=SlowSource(text.train, seconds))

    return mock.patch.object(trainer, "open_text", open_slowly)


def host_work(share: float) -> AbstractContextManager[Any]:
    """After every block's forward pass the host does something else, `share` times as long as the block took."""
    return _on_blocks(lambda block: _linger(block, share))


def waits(count: float) -> AbstractContextManager[Any]:
    """After every block the host asks the device for numbers, `count` times."""
    return _on_blocks(lambda block: block.register_forward_hook(lambda _, args, made: _ask(made, round(count))))


def slow_rank(share: float) -> AbstractContextManager[Any]:
    """The second rank takes `share` times a block's forward pass longer, in every block."""
    return host_work(share) if os.environ.get("RANK") == "1" else mock.patch.dict({})


def slow_reader(seconds: float) -> AbstractContextManager[Any]:
    """The second rank's store takes so long for every batch."""
    return slow_source(seconds) if os.environ.get("RANK") == "1" else mock.patch.dict({})


def busy_logging(share: float) -> AbstractContextManager[Any]:
    """After every step something is logged, `share` times as long as the step took."""
    from armillary.training.gauge_log import Recorder

    plain = Recorder.__call__

    def log_more(self: Any, report: Any, *, last: bool) -> None:
        plain(self, report, last=last)
        time.sleep(share * report.gauges["step_s"])

    return mock.patch.object(Recorder, "__call__", log_more)


def slow_link(share: float) -> AbstractContextManager[Any]:
    """Tensor-parallel exchanges take `share` times as long again as what was computed since the one before. Computed is
    what took a core: waits for other ranks would make each other longer, step by step."""
    from armillary.parallel import collectives

    timed, last = collectives.timed, [time.thread_time()]

    def slowly(group: Any, exchange: Callable[[], Any]) -> Any:
        computed = time.thread_time() - last[0]

        def delayed() -> Any:
            made = exchange()
            time.sleep(share * computed)
            return made

        made = timed(group, delayed)
        last[0] = time.thread_time()
        return made

    return mock.patch.object(collectives, "timed", slowly)


def uneven_machines(share: float) -> AbstractContextManager[Any]:
    """The first rank is alone on its machine, so that its group is on two, and exchanges are slow."""
    from armillary.parallel import mesh

    stack = ExitStack()
    stack.enter_context(mock.patch.object(mesh, "node_id", lambda: "a" if os.environ.get("RANK") == "0" else "b"))
    stack.enter_context(slow_link(share))
    return stack


def collapsed_router(amount: float) -> AbstractContextManager[Any]:
    """Every router prefers its first expert by so much in its logits."""
    from armillary.model.moe.experts import Router

    plain = Router.logits

    def prefer_first(self: Any, x_MH: Any) -> Any:
        logits_ME = plain(self, x_MH).clone()
        logits_ME[:, 0] += amount
        return logits_ME

    return mock.patch.object(Router, "logits", prefer_first)


@contextmanager
def ballast(needed: float) -> Iterator[None]:
    """All of a GPU's memory but `needed` bytes, and a thirtieth, is held by something else."""
    import torch

    free, total = torch.cuda.mem_get_info()
    held = torch.empty(max(0, int(free - needed - total / 30)), dtype=torch.uint8, device="cuda")
    yield
    del held


@contextmanager
def _on_blocks(put: Callable[[Any], Any]) -> Iterator[None]:
    from armillary.training import trainer

    build_model = trainer.build_model

    def faulty(*args: Any, **named: Any) -> Any:
        sharded, choices = build_model(*args, **named)
        for block in sharded.model.blocks.values():
            put(block)
        return sharded, choices

    with mock.patch.object(trainer, "build_model", faulty):
        yield


def _linger(block: Any, share: float) -> None:
    begun: list[float] = []
    block.register_forward_pre_hook(lambda _, args: begun.append(time.perf_counter()))

    def linger(module: Any, args: Any, made: Any) -> None:
        time.sleep(share * (time.perf_counter() - begun.pop()))

    block.register_forward_hook(linger)


def _ask(made: Any, count: int) -> None:
    tensor = made[0] if isinstance(made, tuple) else made
    for _ in range(count):
        tensor.detach().float().mean().item()


KINDS: dict[str, Callable[[float], AbstractContextManager[Any]]] = {
    "slow source": slow_source,
    "host work": host_work,
    "waits": waits,
    "slow rank": slow_rank,
    "slow reader": slow_reader,
    "busy logging": busy_logging,
    "slow link": slow_link,
    "uneven machines": uneven_machines,
    "collapsed router": collapsed_router,
    "ballast": ballast,
}
