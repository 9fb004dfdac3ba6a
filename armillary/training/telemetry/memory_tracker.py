"""Memory by what it is for, measured on a CPU: every storage that operators make is seen, from its birth to its end.

A dispatch mode around one step; sharded tensors count with their local part. What operators use inside
themselves is not seen. The categories are those of a plan, at the moment when most was alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = (torch.ops.aten._to_copy.default,)


class MemoryWatch(TorchDispatchMode):
    """`with MemoryWatch() as watch: … with watch.phase("loss"): …`, then `watch.peak()`."""

    def __init__(self, elsewhere: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        """What is `elsewhere`, offloaded to the host, is not counted."""
        super().__init__()
        self._elsewhere = elsewhere
        self._tag = "activations"
        self._alive: dict[int, tuple[str, int]] = {}
        self._refs: dict[int, Any] = {}
        self._total = 0
        self._most = 0
        self._at_most: dict[int, tuple[str, int]] = {}
        self._gradients: set[int] = set()
        self._resize: Any = None

    # --- called by the meter

    def hold(self, tensors: Iterable[Tensor], tag: str) -> None:
        """Tensors that exist already: weights, optimizer states."""
        for tensor in tensors:
            self._see(local(tensor), tag)

    def gradients(self, tensors: Iterable[Tensor]) -> None:
        """Which of what was made turned out to be gradients."""
        for tensor in tensors:
            key = id(local(tensor).untyped_storage())
            self._gradients.add(key)
            if key not in self._alive:
                self._see(local(tensor), "gradients")

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

    def peak(self) -> dict[str, int]:
        """Tag -> bytes at the moment when most was alive."""
        sizes: dict[str, int] = {}
        for key, (tag, size) in self._at_most.items():
            name = "gradients" if key in self._gradients and tag in ("activations", "backward", "loss") else tag
            sizes[name] = sizes.get(name, 0) + size
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
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = (tag, 0)
            self._refs[key] = weakref.ref(storage, partial(self._end, key))
        self._size(key, storage.size())

    def _size(self, key: int, size: int) -> None:
        tag, before = self._alive[key]
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
            key = id(storage)
            if key not in watch._alive and size:
                watch._alive[key] = ("buffers", 0)
                watch._refs[key] = weakref.ref(storage, partial(watch._end, key))
            if key in watch._alive:
                watch._size(key, size)
            return changed

        self._resize, UntypedStorage.resize_ = original, resize
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        UntypedStorage.resize_ = self._resize
        self._refs.clear()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
