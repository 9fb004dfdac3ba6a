"""Activation offload: what a layer keeps for its backward pass waits in host memory, and is back one layer ahead.

The last layer's stays, since it is wanted first. While a layer computes, what the one before kept travels out; two
layers' activations are on the device at most, in the forward pass as in the backward pass. Weights stay where they are.
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
from armillary.parallel.collectives import Clock
from armillary.parallel.host_memory import Event, HostMemory, Lane, compute_after, computed

LEAST_BYTES = 1 << 14
"""what is smaller is not worth a copy"""
MOST_TIMES = 4
"""the memory that a tensor lies in moves as a whole, unless it is so many times larger"""
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
"""what makes another form of a weight"""


class Activations:
    """Of a model's blocks, from the call of `offload_activations` on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory, self.lane = device, HostMemory(device), Lane(device)
        self.least_bytes = LEAST_BYTES
        self.clock: Clock | None = None
        """hears how long the computation stood still for copies"""
        self._leaving: Kept | None = None

    def call(self, block: nn.Module, last: bool, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        """A block's forward pass."""
        if not torch.is_grad_enabled():
            return forward(*args)
        before = self._leaving
        kept = Kept(self, before if before is not None and before.number < args[-1] else None, args[-1], stays=last)
        stays = Staying(block, args[1:])
        with saved_tensors_hooks(partial(kept.pack, stays), Kept.unpack):
            result = forward(*args)
        if not last:
            kept.send()
        if before is not None:
            before.let_go()
        self._leaving = None if last else kept
        return result

    def can_move(self, tensor: Tensor) -> bool:
        """Plain numbers of this device, enough of them, and most of what they keep alive."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == self.device.type
        if not plain or not tensor.is_floating_point():
            return False
        return self.least_bytes <= tensor.untyped_storage().nbytes() <= MOST_TIMES * tensor.nbytes

    def wait(self, event: Event) -> None:
        """The computation waits for a copy."""
        with self._timed():
            compute_after(event, self.device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies launched inside travel beside the computation, once what was launched is computed; on a CPU it stands
        still for them."""
        with self.handling(), self.lane.on(computed(self.device)):
            yield

    def handling(self) -> AbstractContextManager[None]:
        """The host sees to what is kept: the computation of a GPU goes on meanwhile, that of a CPU stands still."""
        return nullcontext() if self.device.type == "cuda" else self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = self.clock.mark() if self.clock is not None else None
        yield
        if self.clock is not None:
            self.clock.until_now(begin)


class Staying:
    """The tensors of a call that do not move: weights in any form, and what all layers are handed."""

    def __init__(self, block: nn.Module, shared: Iterable[Any]) -> None:
        self._block = block
        self._known = {_address(leaf) for leaf in tree_leaves(list(shared)) if isinstance(leaf, Tensor)}

    def __contains__(self, tensor: Tensor) -> bool:
        if _is_weight(tensor) or _address(tensor) in self._known:
            return True
        # copies are made when they are first asked for, and experts' weights gathered after the block was entered
        self._known |= {_address(each) for each in (*self._block.parameters(), *self._copies())}
        return _address(tensor) in self._known

    def _copies(self) -> Iterator[Tensor]:
        """Half-precision copies that products are made with."""
        for module in self._block.modules():
            for weights_16bit in (
                getattr(module, "weights_16bit", None),
                getattr(getattr(module, "fused", None), "weights_16bit", None),
            ):
                if weights_16bit is not None:
                    yield from (weights_16bit.copies[p] for p in self._block.parameters() if p in weights_16bit.copies)


class Kept:
    """What one call of a block keeps: on the device, on its way, on the host, or back again."""

    def __init__(self, activations: Activations, before: Kept | None, number: int, *, stays: bool) -> None:
        self._all, self.before, self.number, self._stays = activations, before, number, stays
        self._here: list[Tensor | None] = []
        self._there: list[Tensor] = []
        self._uses: list[int] = []
        self._seen: dict[Any, int] = {}
        self._sent: Event = None
        self._came: Event = None
        self._coming = False

    # --- forward

    def pack(self, stays: Staying, tensor: Tensor) -> Any:
        with self._all.handling():
            return self._packed(stays, tensor)

    def _packed(self, stays: Staying, tensor: Tensor) -> Any:
        if not self._all.can_move(tensor) or tensor in stays:
            return tensor
        if self._stays:
            return self, tensor.detach(), None
        if (key := _address(tensor)) not in self._seen:  # several operators may keep parts of it, in several shapes
            self._seen[key] = len(self._here)
            self._here.append(_whole(tensor))
            self._uses.append(0)
        self._uses[self._seen[key]] += 1
        return self, self._seen[key], (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def send(self) -> None:
        """Everything, as soon as it is computed."""
        self._seen.clear()
        with self._all.copying():
            for tensor in self._here:
                assert tensor is not None
                self._there.append(self._all.memory.like(tensor).copy_(tensor, non_blocking=True))
        self._sent = self._all.lane.mark()

    def let_go(self) -> None:
        """Of the device's memory, which is used again once the copies are done."""
        if not self._coming:
            self._all.wait(self._sent)
            self._here = [None] * len(self._here)

    # --- backward

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, what, form = packed
        with kept._all.handling():
            return kept.unpacked(what, form)  # type: ignore[no-any-return]

    def unpacked(self, what: Any, form: Any) -> Tensor:
        """What was kept, and on its way what the layer before kept."""
        self.come()
        if self.before is not None:
            self.before.come()
            self.before = None
        found = what if isinstance(what, Tensor) else self.give(what)
        return found if form is None else found.view(form[0]).as_strided(*form[1:])

    def give(self, index: int) -> Tensor:
        if self._came is not None:
            self._all.wait(self._came)
            self._came = None
        found = self._here[index]
        if found is None:  # asked for again, by a second backward pass
            return self._there[index].to(self._all.device)
        self._uses[index] -= 1
        if not self._uses[index]:
            self._here[index] = None
        return found

    def come(self) -> None:
        """Fetch everything; nothing where it never left or is under way."""
        if self._coming or not self._there:
            return
        self._coming = True
        if self._here[0] is not None:  # wanted before it was let go
            self._all.wait(self._sent)
            return
        self._here = [torch.empty_like(tensor, device=self._all.device) for tensor in self._there]
        with self._all.copying():
            for here, there in zip(self._here, self._there, strict=True):
                assert here is not None
                here.copy_(there, non_blocking=True)
        self._came = self._all.lane.mark()


def offload_activations(model: Transformer, device: torch.device) -> Activations:
    """Wrap every block; call it after compiling and before the model is shared out."""
    made, names = Activations(device), list(model.blocks)
    for name, block in model.blocks.items():
        block.forward = partial(made.call, block, name == names[-1], block.forward)
    return made


def _whole(tensor: Tensor) -> Tensor:
    """All numbers of the memory it lies in, one after the other."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _is_weight(tensor: Tensor) -> bool:
    """A parameter, or a cast or turned one."""
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _FORMS:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _address(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()  # type: ignore[no-any-return]
