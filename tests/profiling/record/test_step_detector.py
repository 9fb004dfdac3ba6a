"""Whose end is a step of a script, and that Dynamo compiles what it would compile without us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as modules

from armillary.profiling.record.step_detector import StepDetector

Train = Callable[[Callable[..., Any]], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * 2


class Followed:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.ends, self.anews, self.compiles = 0, 0, 0
        self.steps = StepDetector(ended=self.ended, restart=self.restart, compiling=self.compiling)

    def ended(self, optimizer: object) -> None:
        self.ends += 1

    def restart(self) -> None:
        self.anews, self.ends = self.anews + 1, 0

    def compiling(self) -> None:
        assert not modules._has_any_global_hook()
        self.compiles += 1


@pytest.fixture
def followed() -> Iterator[Followed]:
    torch._dynamo.reset()
    plain = (torch.compile, torch.export.export, torch._dynamo.optimize)
    made = Followed()
    made.steps.watch()
    yield made
    made.steps.release()
    assert (torch.compile, torch.export.export, torch._dynamo.optimize) == plain
    assert not modules._has_any_global_hook()
    made.steps._optimizer_handle.remove()  # which a script that compiles keeps to its end


@pytest.fixture
def net() -> Net:
    return Net()


def infer(call: Callable[[torch.Tensor], object], times: int = 5) -> None:
    with torch.no_grad():
        for _ in range(times):
            call(torch.ones(2, 4))


def train(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], times: int = 5) -> None:
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
    for _ in range(times):
        call(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_two_optimisers_take_one_step(followed: Followed, net: Net) -> None:
    train(net, net)
    assert (followed.steps.what, followed.ends) == ("optimizer", 5)


def test_outermost_modules_are_steps_from_the_second_call(followed: Followed, net: Net) -> None:
    infer(net)
    assert (followed.steps.what, followed.ends) == ("forward", 4)


def test_layers_called_in_turn_are_one_step(followed: Followed, net: Net) -> None:
    infer(lambda x: [layer(x) for layer in net.body])
    assert followed.ends == 4


def test_a_look_before_training_does_not_count(followed: Followed, net: Net) -> None:
    infer(net, 3)
    train(net, net)
    assert (followed.steps.what, followed.anews, followed.ends) == ("optimizer", 1, 5)


def compiled_module(net: Net) -> Callable[..., Any]:
    return torch.compile(net, backend="eager")


def compiled_in_place(net: Net) -> Callable[..., Any]:
    net.compile(backend="eager")
    return net


def compiled_function(net: Net) -> Callable[..., Any]:
    @torch.compile(backend="eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    return call


def compiled_twice(net: Net) -> Callable[..., Any]:
    inner = torch.compile(lambda x: net(x) + 1, backend="eager")
    return torch.compile(lambda x: inner(x) * 2, backend="eager")


def compiled_layers(net: Net) -> Callable[..., Any]:
    for layer in net.body:
        layer.compile(backend="eager")
    return net


def compiled_by_dynamo(net: Net) -> Callable[..., Any]:
    return torch._dynamo.optimize("eager")(net)  # type: ignore[no-any-return]


FOLLOWED = [compiled_module, compiled_in_place, compiled_function, compiled_twice, compiled_layers]


def compiles(work: Callable[[], object]) -> dict[str, Any]:
    """What Dynamo counts while work is done."""
    torch._dynamo.reset()
    counters.clear()
    work()
    return {name: dict(counters[name]) for name in ("frames", "stats", "graph_break")}


@pytest.mark.parametrize("maker", [*FOLLOWED, compiled_by_dynamo])
@pytest.mark.parametrize("eager_steps", [0, 2])
def test_dynamo_compiles_the_same(maker: Callable[[Net], Any], eager_steps: int) -> None:
    def work() -> None:
        net = Net()
        train(net, net, eager_steps)
        train(net, maker(net))

    alone, made = compiles(work), Followed()
    made.steps.watch()
    beside = compiles(work)
    made.steps.release()
    made.steps._optimizer_handle.remove()
    assert beside == alone
    assert made.compiles and made.ends == eager_steps + (0 if eager_steps else 5)  # the second pair is not the first's


@pytest.mark.parametrize("maker", FOLLOWED)
def test_compiled_calls_are_steps_of_inference(followed: Followed, net: Net, maker: Callable[[Net], Any]) -> None:
    infer(maker(net))
    assert followed.ends == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_optimiser_step_ends_steps(net: Net) -> None:
    def work() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(5):
            net(torch.ones(2, 4)).sum().backward()
            step()

    alone, made = compiles(work), Followed()
    made.steps.watch()
    beside = compiles(work)
    made.steps.release()
    made.steps._optimizer_handle.remove()
    assert beside["stats"] == alone["stats"] and beside["graph_break"] == alone["graph_break"]  # the same graphs
    assert (made.steps.what, made.ends) == ("compiled", 4)


def test_what_is_compiled_keeps_its_looks(followed: Followed) -> None:
    @torch.compile(backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Twice."""
        return x * 2

    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")
    assert torch.compile.__name__ == "compile" and torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))


def test_export_finds_no_hooks(followed: Followed, net: Net) -> None:
    made = torch.export.export(net, (torch.ones(2, 4),), strict=True)
    assert followed.compiles == 1 and torch.equal(made.module()(torch.ones(2, 4)), net(torch.ones(2, 4)))
