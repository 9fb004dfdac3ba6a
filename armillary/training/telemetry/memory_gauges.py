"""Memory of one step by what it is for, under the gauge names of a plan: through the allocator on a GPU, through a
watch over every operator on a CPU.

Weights, gradients and optimizer states are those of this rank; activations are what the forward pass saves. On a CPU
sharded tensors count with their local part, and what operators use inside themselves is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armillary.parallel.ddp import local_of

Sizes = dict[str, float]
"""gauge -> bytes"""
Elsewhere = Callable[[Tensor], bool]


class NullMeter:
    """For the steps that are not measured."""

    source = ""
    peak = 0.0
    """most of the step, where only this meter knows it"""

    def phase(self, tag: str) -> AbstractContextManager[Any]:
        """What runs inside is forward, loss, backward or optimizer."""
        return nullcontext()

    def mark_hidden(self, hidden: Tensor) -> None:
        """What the backward pass makes before it has the gradient of `hidden` is for the loss."""

    def step(self) -> AbstractContextManager[NullMeter]:
        """Around one step; gives the meter."""
        return nullcontext(self)

    def sizes(self) -> Sizes:
        return {}


class CpuMeter(NullMeter):
    """Every tensor that operators make, while they live."""

    source = "tracker"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        half: bool,
        elsewhere: Elsewhere = lambda tensor: False,
    ) -> None:
        self._model, self._optimizer, self._half = model, optimizer, half
        self._watch = MemoryWatch(elsewhere)

    @contextmanager
    def step(self) -> Iterator[NullMeter]:
        with self._watch as watch:
            trained, frozen = parted(self._model)
            watch.add(trained, "master" if self._half else "weights")
            watch.add(frozen, "weights")
            watch.add(states_of(self._optimizer), "optimizer")
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
        peak["activations"] += peak.pop("backward", 0)
        return {f"memory_{name}_bytes": float(size) for name, size in peak.items()}


class GpuMeter(NullMeter):
    """The allocator's counters between phases, at the phase whose peak is the step's; nothing waits for the device."""

    source = "allocator"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool, device: torch.device) -> None:
        self._model, self._optimizer, self._half, self._device = model, optimizer, half, device
        self._resident: Sizes = {}
        self._base = self.peak = 0.0
        self._at_peak: Sizes = {}

    @contextmanager
    def step(self) -> Iterator[NullMeter]:
        self._base, self.peak = self._now(), 0.0
        trained, frozen = parted(self._model)
        wide = bytes_of(p for p in trained if p.dtype == torch.float32)
        narrow = bytes_of(trained) - wide
        states = bytes_of(state for state in states_of(self._optimizer) if state.is_cuda)
        rest = bytes_of(frozen) + narrow
        copies = max(0.0, self._base - wide - rest - states)  # those that fp32 weights are multiplied as
        weights = {"master": wide, "weights": copies + rest} if self._half else {"weights": wide + rest}
        self._resident = weights | {"optimizer": states}
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
            self._at_peak = {"gradients": gradients, "loss": loss, "activations": rest}

    def _now(self) -> float:
        return float(torch.cuda.memory_allocated(self._device))

    def sizes(self) -> Sizes:
        """At the peak; gradients are those that were there when its phase began, what the backward pass had in flight
        counts as activations."""
        return {f"memory_{name}_bytes": size for name, size in (self._resident | self._at_peak).items()}


def make_meter(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    half: bool,
    device: torch.device,
    compiled: bool,
    elsewhere: Elsewhere = lambda tensor: False,
) -> NullMeter:
    """The meter of this device; compiled code on a CPU hides its tensors, so it has no gauges. What is `elsewhere`
    waits on the host and is not the device's, though that is where a CPU keeps its own."""
    if device.type == "cuda":
        return GpuMeter(model, optimizer, half=half, device=device)
    return NullMeter() if compiled else CpuMeter(model, optimizer, half=half, elsewhere=elsewhere)


def parted(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters that are stepped, those that adapters leave frozen)."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def bytes_of(tensors: Any) -> float:
    """What this rank holds of them."""
    return float(sum(local_of(tensor).nbytes for tensor in tensors if tensor is not None))


_COPIES = (torch.ops.aten._to_copy.default,)


class MemoryWatch(TorchDispatchMode):
    """`with MemoryWatch() as watch: … with watch.phase("loss"): …`, then `watch.peak()`."""

    def __init__(self, elsewhere: Elsewhere = lambda tensor: False) -> None:
        """What is `elsewhere`, offloaded to the host, is not counted."""
        super().__init__()
        self._elsewhere = elsewhere
        self._tag = "activations"
        self._alive: dict[int, tuple[str, int]] = {}
        self._refs: dict[int, Any] = {}
        self._total = self._most = 0
        self._at_most: dict[int, tuple[str, int]] = {}
        self._gradients: set[int] = set()
        self._resize: Any = None

    # --- called by the meter

    def add(self, tensors: Iterable[Tensor], tag: str) -> None:
        """Tensors that exist already: weights, optimizer states."""
        for tensor in tensors:
            self._see(local_of(tensor), tag)

    def gradients(self, tensors: Iterable[Tensor]) -> None:
        """Which of what was made turned out to be gradients."""
        for tensor in tensors:
            key = id(local_of(tensor).untyped_storage())
            self._gradients.add(key)
            if key not in self._alive:
                self._see(local_of(tensor), "gradients")

    @contextmanager
    def phase(self, tag: str) -> Any:
        """What is made inside is for this."""
        before, self._tag = self._tag, tag
        try:
            yield
        finally:
            self._tag = before

    def now(self, tag: str) -> None:
        """From here to the end of the phase, what is made is for this."""
        self._tag = tag

    def peak(self) -> Counter[str]:
        """Tag -> bytes at the moment when most was alive."""
        sizes: Counter[str] = Counter()
        for key, (tag, size) in self._at_most.items():
            sizes["gradients" if key in self._gradients and tag in ("activations", "backward", "loss") else tag] += size
        return sizes

    # --- called by torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then runs its local operators, which come here
        outputs = func(*args, **(kwargs or {}))
        tag = "weights" if func in _COPIES and self._is_weight(args[0]) else self._tag
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._see(leaf, tag)
        return outputs

    def _is_weight(self, tensor: Any) -> bool:
        known = self._alive.get(id(tensor.untyped_storage())) if isinstance(tensor, Tensor) else None
        return known is not None and known[0] in ("weights", "master")

    def _see(self, tensor: Tensor, tag: str) -> None:
        if tensor.device.type != "cpu" or isinstance(tensor, DTensor) or self._elsewhere(tensor):
            return
        storage = tensor.untyped_storage()
        self._size(storage, storage.size(), tag)

    def _size(self, storage: UntypedStorage, size: int, tag: str) -> None:
        """A storage has this size now; it is for `tag` where it is new."""
        key = id(storage)
        if key not in self._alive:
            self._refs[key] = weakref.ref(storage, partial(self._end, key))
        tag, before = self._alive.get(key, (tag, 0))
        self._alive[key] = (tag, size)
        self._total += size - before
        if self._total > self._most:
            self._most, self._at_most = self._total, dict(self._alive)

    def _end(self, key: int, storage: Any) -> None:
        self._refs.pop(key, None)
        self._total -= self._alive.pop(key, ("", 0))[1]

    def __enter__(self) -> MemoryWatch:
        """FSDP grows and empties the storage of gathered weights in place, which no operator shows."""
        original, watch = UntypedStorage.resize_, self

        def resize(storage: UntypedStorage, size: int) -> UntypedStorage:
            changed = original(storage, size)
            if size or id(storage) in watch._alive:
                watch._size(storage, size, "buffers")
            return changed

        self._resize, UntypedStorage.resize_ = original, resize
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        UntypedStorage.resize_ = self._resize
        self._refs.clear()
