"""Data parallelism over whole copies: gradients are summed in buckets while the backward pass still runs.

What torch's DistributedDataParallel does, kept small so that names stay, sums stay sums (the loss is divided by the
global count of targets before), and parameters may be cut by tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


@dataclass(kw_only=True)
class Bucket:
    """Gradients that travel together."""

    parameters: list[nn.Parameter]
    waiting: set[nn.Parameter] = field(default_factory=set)
    """those whose gradient is not there yet"""
    flat: Tensor | None = None
    work: dist.Work | None = None


class Replicas:
    """Sums gradients over `group`, bucket by bucket in the order in which a backward pass makes them."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, bucket_bytes: int) -> None:
        self.group = group
        self.armed = False
        self.buckets = _buckets([p for p in parameters if p.requires_grad], bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._next = 0
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def arm(self) -> None:
        """The next backward pass is the last of its step: send gradients as they get ready."""
        self.armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.waiting = set(bucket.parameters)

    def _ready(self, parameter: Tensor) -> None:
        if not self.armed:
            return
        assert isinstance(parameter, nn.Parameter)
        self._bucket_of[parameter].waiting.discard(parameter)
        # always in the same order, whatever gets ready first here: ranks must agree on it
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._send(self.buckets[self._next])
            self._next += 1

    def finish(self) -> None:
        """Send what no gradient arrived for, wait for all, and put the sums in place."""
        self.armed = False
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for bucket in self.buckets:
            assert bucket.work is not None and bucket.flat is not None
            bucket.work.wait()
            _put_back(bucket.flat, bucket.parameters)
            bucket.work = bucket.flat = None

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        pieces = [_local_gradient(parameter).reshape(-1) for parameter in bucket.parameters]
        bucket.flat = torch.cat(pieces)
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)


def _buckets(parameters: list[nn.Parameter], limit: int) -> list[Bucket]:
    """Last layers first; one dtype a bucket."""
    made: list[Bucket] = []
    size = 0
    for parameter in reversed(parameters):
        fits = made and made[-1].parameters[0].dtype == parameter.dtype and size + parameter.nbytes <= limit
        if not fits:
            made.append(Bucket(parameters=[]))
            size = 0
        made[-1].parameters.append(parameter)
        size += parameter.nbytes
    return made


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part, made of zeros where this rank had no use for the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_of(parameter.grad)


def local_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _put_back(flat: Tensor, parameters: list[nn.Parameter]) -> None:
    targets = [_local_gradient(parameter) for parameter in parameters]
    for target, piece in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
        target.copy_(piece.view_as(target))


@torch.no_grad()
def sum_partial(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Gradients of which each tensor-parallel rank has a part, summed in one exchange."""
    found = [p for p in parameters if isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements)]
    if not found:
        return
    flat = torch.cat([local_of(p.grad).reshape(-1) for p in found if p.grad is not None])
    dist.all_reduce(flat, group=group)
    _put_back(flat, found)
    for parameter in found:
        assert isinstance(parameter.grad, DTensor)
        parameter.grad = DTensor.from_local(
            parameter.grad._local_tensor, parameter.grad.device_mesh, [Replicate()], run_check=False
        )
