"""Memory of one step by what it is for, under the gauge names of a plan: through the allocator on a GPU, through a
watch over every operator on a CPU.

Weights, gradients and optimiser states are what this rank holds; activations are what the forward pass keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from armillary.training.memory_watch import MemoryWatch, local

Sizes = dict[str, float]
"""gauge -> bytes"""


class NoMeter:
    """For the steps that are not measured."""

    source = ""
    peak = 0.0
    """most of the step, where only this meter knows it"""

    def phase(self, tag: str) -> AbstractContextManager[Any]:
        """What runs inside is forward, loss, backward or optimizer."""
        return nullcontext()

    def step(self) -> AbstractContextManager[NoMeter]:
        """Around one step; gives the meter."""
        return nullcontext(self)

    def sizes(self) -> Sizes:
        return {}


class CpuMeter(NoMeter):
    """Every tensor that operators make, while they live."""

    source = "tracker"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool) -> None:
        self._model, self._optimizer, self._half = model, optimizer, half
        self._watch = MemoryWatch()

    @contextmanager
    def step(self) -> Iterator[NoMeter]:
        with self._watch as watch:
            trained, frozen = parted(self._model)
            watch.hold(trained, "master" if self._half else "weights")
            watch.hold(frozen, "weights")
            watch.hold(states_of(self._optimizer), "optimizer")
            yield self

    @contextmanager
    def phase(self, tag: str) -> Iterator[None]:
        with self._watch.phase({"forward": "activations"}.get(tag, tag)):
            yield
        if tag == "backward":
            self._watch.gradients(p.grad for p in self._model.parameters() if p.grad is not None)

    def sizes(self) -> Sizes:
        """At the peak; what the backward pass has in flight counts as activations, as in a plan."""
        found = self._watch.peak()
        found["activations"] = found.get("activations", 0) + found.pop("backward", 0)
        return {f"memory_{name}_bytes": float(size) for name, size in found.items()}


class GpuMeter(NoMeter):
    """The allocator's counters between phases; nothing waits for the device."""

    source = "allocator"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool, device: torch.device) -> None:
        self._model, self._optimizer, self._half, self._device = model, optimizer, half, device
        self._most: Sizes = {}
        self.peak = 0.0

    @contextmanager
    def step(self) -> Iterator[NoMeter]:
        base, self.peak = self._now(), 0.0
        trained, frozen = map(bytes_of, parted(self._model))
        states = bytes_of(states_of(self._optimizer))
        copies = max(0.0, base - trained - frozen - states)  # beside fp32 weights: those they are multiplied as
        held = {"master": trained, "weights": copies + frozen} if self._half else {"weights": trained + frozen}
        self._most = held | {"optimizer": states}
        yield self

    @contextmanager
    def phase(self, tag: str) -> Iterator[None]:
        before = self._now()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        highest = float(torch.cuda.max_memory_allocated(self._device))
        self.peak = max(self.peak, highest)
        if tag == "forward":
            self._keep("activations", self._now() - before)
        elif tag == "loss":
            self._keep("loss", highest - before)
        elif tag == "backward":
            self._keep("gradients", bytes_of(p.grad for p in self._model.parameters() if p.grad is not None))

    def _keep(self, name: str, size: float) -> None:
        self._most[name] = max(self._most.get(name, 0.0), size)

    def _now(self) -> float:
        return float(torch.cuda.memory_allocated(self._device))

    def sizes(self) -> Sizes:
        """The largest of each category; `other` is what the peak has beyond them all."""
        found = self._most | {"other": max(0.0, self.peak - sum(self._most.values()))}
        return {f"memory_{name}_bytes": float(size) for name, size in found.items()}


def make_meter(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool, device: torch.device, compiled: bool
) -> NoMeter:
    """The meter of this device; compiled code on a CPU hides its tensors, so nothing is said of it."""
    if device.type == "cuda":
        return GpuMeter(model, optimizer, half=half, device=device)
    return NoMeter() if compiled else CpuMeter(model, optimizer, half=half)


def parted(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters that are stepped, those that adapters leave frozen)."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def bytes_of(tensors: Any) -> float:
    """What this rank holds of them."""
    return float(sum(local(tensor).nbytes for tensor in tensors if tensor is not None))
