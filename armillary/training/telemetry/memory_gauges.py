"""Memory of one step by what it is for, under the gauge names of a plan: through the allocator on a GPU, through a
watch over every operator on a CPU.

Weights, gradients and optimizer states are those of this rank; activations are what the forward pass saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from armillary.training.telemetry.memory_tracker import MemoryWatch, local

Sizes = dict[str, float]
"""gauge -> bytes"""
Elsewhere = Callable[[Tensor], bool]


def _nowhere(tensor: Tensor) -> bool:
    return False


class NoMeter:
    """For the steps that are not measured."""

    source = ""
    peak = 0.0
    """most of the step, where only this meter knows it"""

    def phase(self, tag: str) -> AbstractContextManager[Any]:
        """What runs inside is forward, loss, backward or optimizer."""
        return nullcontext()

    def mark_hidden(self, hidden: Tensor) -> None:
        """What the backward pass makes before it has the gradient of `hidden` is for the loss."""

    def step(self) -> AbstractContextManager[NoMeter]:
        """Around one step; gives the meter."""
        return nullcontext(self)

    def sizes(self) -> Sizes:
        return {}


class CpuMeter(NoMeter):
    """Every tensor that operators make, while they live."""

    source = "tracker"

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool, elsewhere: Elsewhere = _nowhere
    ) -> None:
        self._model, self._optimizer, self._half = model, optimizer, half
        self._watch = MemoryWatch(elsewhere)

    @contextmanager
    def step(self) -> Iterator[NoMeter]:
        with self._watch as watch:
            trained, frozen = parted(self._model)
            watch.hold(trained, "master" if self._half else "weights")
            watch.hold(frozen, "weights")
            watch.hold(states_of(self._optimizer), "optimizer")
            yield self

    def mark_hidden(self, hidden: Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._watch.now("backward"))

    @contextmanager
    def phase(self, tag: str) -> Iterator[None]:
        with self._watch.phase({"forward": "activations", "backward": "loss"}.get(tag, tag)):
            yield
        if tag == "backward":
            self._watch.gradients(p.grad for p in self._model.parameters() if p.grad is not None)

    def sizes(self) -> Sizes:
        """At the peak; what layers have in flight in the backward pass counts as activations, as in a plan."""
        peak = self._watch.peak()
        peak["activations"] = peak.get("activations", 0) + peak.pop("backward", 0)
        return {f"memory_{name}_bytes": float(size) for name, size in peak.items()}


class GpuMeter(NoMeter):
    """The allocator's counters between phases, at the phase whose peak is the step's; nothing waits for the device."""

    source = "allocator"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool, device: torch.device) -> None:
        self._model, self._optimizer, self._half, self._device = model, optimizer, half, device
        self._held: Sizes = {}
        self._base = self.peak = 0.0
        self._then: Sizes = {}

    @contextmanager
    def step(self) -> Iterator[NoMeter]:
        self._base, self.peak = self._now(), 0.0
        trained, frozen = parted(self._model)
        wide = bytes_of(p for p in trained if p.dtype == torch.float32)
        narrow = bytes_of(trained) - wide
        states = bytes_of(state for state in states_of(self._optimizer) if state.is_cuda)
        rest = bytes_of(frozen) + narrow
        copies = max(0.0, self._base - wide - rest - states)  # those that fp32 weights are multiplied as
        held = {"master": wide, "weights": copies + rest} if self._half else {"weights": wide + rest}
        self._held = held | {"optimizer": states}
        yield self

    @contextmanager
    def phase(self, tag: str) -> Iterator[None]:
        before, gradients = self._now(), bytes_of(p.grad for p in self._model.parameters() if p.grad is not None)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        highest = float(torch.cuda.max_memory_allocated(self._device))
        if highest > self.peak:
            self.peak = highest
            loss = highest - before if tag == "loss" else 0.0
            rest = max(0.0, highest - loss - gradients - self._base)
            self._then = {"gradients": gradients, "loss": loss, "activations": rest}

    def _now(self) -> float:
        return float(torch.cuda.memory_allocated(self._device))

    def sizes(self) -> Sizes:
        """At the peak; gradients are those that were there when its phase began, what the backward pass had in flight
        counts as activations."""
        peak = self._held | self._then
        return {f"memory_{name}_bytes": float(size) for name, size in peak.items()}


def make_meter(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    half: bool,
    device: torch.device,
    compiled: bool,
    elsewhere: Elsewhere = _nowhere,
) -> NoMeter:
    """The meter of this device; compiled code on a CPU hides its tensors, so nothing is said of it. What is `elsewhere`
    waits on the host and is not the device's, though that is where a CPU keeps its own."""
    if device.type == "cuda":
        return GpuMeter(model, optimizer, half=half, device=device)
    return NoMeter() if compiled else CpuMeter(model, optimizer, half=half, elsewhere=elsewhere)


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
