"""Activation offload: the saved tensors of a layer wait in host memory, and are fetched one layer ahead of their use.

Those of the last layer stay, since they are needed first. While a layer computes, the saved tensors of the previous one
are copied out; at most two layers' activations are on the device, in both passes. Weights are not offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from armillary.model.transformer import Transformer
from armillary.parallel.collectives import WaitTimer
from armillary.parallel.host_memory import CopyStream, Event, HostMemory, compute_after, computed

LEAST_BYTES = 1 << 14
"""smaller tensors are not worth a copy"""
MOST_TIMES = 4
"""the full storage of a tensor is copied, unless it is this many times larger than the tensor"""
_FORMS = (
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "AliasBackward0",
    "_ToTorchTensorBackward",
    "_StandingBackward",
)
"""autograd nodes that give another form (cast, view) of a weight"""


class Activations:
    """The offloaded activations of a model's blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory, self.copy_stream = device, HostMemory(device), CopyStream(device)
        self.least_bytes = LEAST_BYTES
        self.timer: WaitTimer | None = None
        """times how long the computation waits for copies"""
        self._leaving: SavedTensors | None = None

    def call(self, block: nn.Module, last: bool, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        """A block's forward pass."""
        if not torch.is_grad_enabled():
            return forward(*args)
        previous = self._leaving
        earlier = previous if previous is not None and previous.number < args[-1] else None
        saved = SavedTensors(self, earlier, args[-1], stays=last)
        resident = ResidentTensors(block, args[1:])
        with saved_tensors_hooks(partial(saved.pack, resident), SavedTensors.unpack):
            result = forward(*args)
        if not last:
            saved.send()
        if previous is not None:
            previous.release()
        self._leaving = None if last else saved
        return result

    def can_move(self, tensor: Tensor) -> bool:
        """Floating-point tensors of this device that are large enough and most of their storage."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == self.device.type
        if not plain or not tensor.is_floating_point():
            return False
        return self.least_bytes <= tensor.untyped_storage().nbytes() <= MOST_TIMES * tensor.nbytes

    def wait(self, event: Event) -> None:
        """The compute stream waits for a copy."""
        with self._timed():
            compute_after(event, self.device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies launched inside run beside the computation, after the work launched so far; a CPU waits for them."""
        with self.handling(), self.copy_stream.on(computed(self.device)):
            yield

    def handling(self) -> AbstractContextManager[None]:
        """Around the host's bookkeeping: a GPU computes meanwhile, a CPU waits, which is timed."""
        return nullcontext() if self.device.type == "cuda" else self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = self.timer.mark() if self.timer is not None else None
        yield
        if self.timer is not None:
            self.timer.until_now(begin)


class ResidentTensors:
    """The tensors of a call that stay on the device: weights in any form, and the inputs that all layers share."""

    def __init__(self, block: nn.Module, shared: Iterable[Any]) -> None:
        self._block = block
        self._known = {_address(leaf) for leaf in tree_leaves(list(shared)) if isinstance(leaf, Tensor)}

    def __contains__(self, tensor: Tensor) -> bool:
        if _is_weight(tensor) or _address(tensor) in self._known:
            return True
        # copies are made on first use, and experts' weights are all-gathered after the block was entered
        self._known |= {_address(each) for each in (*self._block.parameters(), *self._copies())}
        return _address(tensor) in self._known

    def _copies(self) -> Iterator[Tensor]:
        """16-bit copies of the weights."""
        for module in self._block.modules():
            for weights_16bit in (
                getattr(module, "weights_16bit", None),
                getattr(getattr(module, "fused", None), "weights_16bit", None),
            ):
                if weights_16bit is not None:
                    yield from (weights_16bit.copies[p] for p in self._block.parameters() if p in weights_16bit.copies)


class SavedTensors:
    """The saved tensors of one call of a block: on the device, being copied, on the host, or fetched again."""

    def __init__(self, activations: Activations, previous: SavedTensors | None, number: int, *, stays: bool) -> None:
        self._all, self.previous, self.number, self._stays = activations, previous, number, stays
        self._on_device: list[Tensor | None] = []
        self._on_host: list[Tensor] = []
        self._uses: list[int] = []
        self._index: dict[Any, int] = {}
        self._sent: Event = None
        self._fetched: Event = None
        self._fetching = False

    # --- forward

    def pack(self, resident: ResidentTensors, tensor: Tensor) -> Any:
        with self._all.handling():
            return self._packed(resident, tensor)

    def _packed(self, resident: ResidentTensors, tensor: Tensor) -> Any:
        if not self._all.can_move(tensor) or tensor in resident:
            return tensor
        if self._stays:
            return self, tensor.detach(), None
        if (key := _address(tensor)) not in self._index:  # several operators may save parts of it, in several shapes
            self._index[key] = len(self._on_device)
            self._on_device.append(_storage(tensor))
            self._uses.append(0)
        self._uses[self._index[key]] += 1
        return self, self._index[key], (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def send(self) -> None:
        """Copy everything to the host, as soon as it is computed."""
        self._index.clear()
        with self._all.copying():
            for tensor in self._on_device:
                assert tensor is not None
                self._on_host.append(self._all.memory.buffer_for(tensor).copy_(tensor, non_blocking=True))
        self._sent = self._all.copy_stream.mark()

    def release(self) -> None:
        """Free the device memory, which is reused once the copies are done."""
        if not self._fetching:
            self._all.wait(self._sent)
            self._on_device = [None] * len(self._on_device)

    # --- backward

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved, what, form = packed
        with saved._all.handling():
            return saved.unpacked(what, form)  # type: ignore[no-any-return]

    def unpacked(self, what: Any, form: Any) -> Tensor:
        """The saved tensor; starts to fetch those of the previous layer."""
        self.fetch()
        if self.previous is not None:
            self.previous.fetch()
            self.previous = None
        tensor = what if isinstance(what, Tensor) else self.get(what)
        return tensor if form is None else tensor.view(form[0]).as_strided(*form[1:])

    def get(self, index: int) -> Tensor:
        if self._fetched is not None:
            self._all.wait(self._fetched)
            self._fetched = None
        tensor = self._on_device[index]
        if tensor is None:  # a second backward pass
            return self._on_host[index].to(self._all.device)
        self._uses[index] -= 1
        if not self._uses[index]:
            self._on_device[index] = None
        return tensor

    def fetch(self) -> None:
        """Copy everything to the device, unless it never left or is being fetched."""
        if self._fetching or not self._on_host:
            return
        self._fetching = True
        if self._on_device[0] is not None:  # needed before it was released
            self._all.wait(self._sent)
            return
        self._on_device = [torch.empty_like(tensor, device=self._all.device) for tensor in self._on_host]
        with self._all.copying():
            for tensor, copy in zip(self._on_device, self._on_host, strict=True):
                assert tensor is not None
                tensor.copy_(copy, non_blocking=True)
        self._fetched = self._all.copy_stream.mark()


def offload_activations(model: Transformer, device: torch.device) -> Activations:
    """Wrap every block; called after compiling and before FSDP."""
    activations, names = Activations(device), list(model.blocks)
    for name, block in model.blocks.items():
        block.forward = partial(activations.call, block, name == names[-1], block.forward)
    return activations


def _storage(tensor: Tensor) -> Tensor:
    """Its full storage as a flat tensor."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _is_weight(tensor: Tensor) -> bool:
    """A parameter, or a cast or transposed one."""
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _FORMS:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _address(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()  # type: ignore[no-any-return]
