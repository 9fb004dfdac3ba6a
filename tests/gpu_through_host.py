"""Messages and collectives of GPU tensors over gloo, through the host: for tests in which several ranks share one GPU,
where NCCL refuses to work. Gloo cannot send GPU tensors to a peer at all, and with torch 2.11 its reduce-scatter and
all-gather of them end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
"""operators of torch's c10d library, which every collective goes through, functional or not"""
_NAMES = ("isend", "irecv", "send", "recv")


class _Message:
    """A message on its way; what is received is copied to the device when it is waited for."""

    def __init__(self, work: Any, host: Tensor, target: Tensor | None = None) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        if self._target is not None:
            with torch.no_grad():
                self._target.copy_(self._host)
            self._target = None
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def on_host(collective: Any, kind: str) -> Callable[..., Any]:
    """A collective of tensors on a device of this kind as the one of copies on the host, complete when it returns."""

    def run(*args: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.device.type == kind]
        copies = [tensor.detach().to("cpu") for tensor in tensors]
        by_id = {id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)}
        with torch.no_grad():
            result = collective(*tree_map(lambda leaf: by_id.get(id(leaf), leaf), args))
            Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
            # What is written comes first among the arguments, and what is read may be a view of it.
            for tensor, copy in zip(reversed(tensors), reversed(copies), strict=True):
                tensor.detach().copy_(copy)
        return (args[0], *result[1:]) if isinstance(result, tuple) else result

    return run


@contextmanager
def collectives_on_host(kind: str) -> Iterator[None]:
    library = torch.library.Library("c10d", "IMPL")
    for name in COLLECTIVES:
        library.impl(name, on_host(getattr(torch.ops.c10d, name).default, kind), kind.upper())
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def through_host(kind: str = "cuda") -> Iterator[list[int]]:
    """Inside, messages of tensors on a device of this kind go through the host, and so do collectives of GPU tensors;
    yields the bytes of each message to a peer."""
    original = {name: getattr(distributed_c10d, name) for name in _NAMES}
    carried: list[int] = []

    def isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device.type != kind:
            return original["isend"](tensor, *args, **options)
        host = _host_copy(tensor).copy_(tensor.detach())
        carried.append(host.nbytes)
        return _Message(original["isend"](host, *args, **options), host)

    def irecv(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device.type != kind:
            return original["irecv"](tensor, *args, **options)
        host = _host_copy(tensor)
        return _Message(original["irecv"](host, *args, **options), host, tensor)

    def send(tensor: Tensor, *args: Any, **options: Any) -> None:
        isend(tensor, *args, **options).wait()

    def recv(tensor: Tensor, *args: Any, **options: Any) -> None:
        irecv(tensor, *args, **options).wait()

    changed = {"isend": isend, "irecv": irecv, "send": send, "recv": recv}
    try:
        for module in (dist, distributed_c10d):
            for name in _NAMES:
                setattr(module, name, changed[name])
        with collectives_on_host(kind) if kind != "cpu" else nullcontext():
            yield carried
    finally:
        for module in (dist, distributed_c10d):
            for name in _NAMES:
                setattr(module, name, original[name])
