"""Point-to-point messages of GPU tensors over gloo, which carries them only for CPU tensors: through pinned memory.

For tests in which several ranks share one GPU, where NCCL refuses to work. Collectives of GPU tensors are gloo's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

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


@contextmanager
def through_host(kind: str = "cuda") -> Iterator[list[int]]:
    """Inside, isend, irecv, send and recv of tensors on a device of this kind go through the host; yields the bytes of
    each message."""
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
        yield carried
    finally:
        for module in (dist, distributed_c10d):
            for name in _NAMES:
                setattr(module, name, original[name])
