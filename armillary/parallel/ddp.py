"""Data parallelism over full replicas: gradients are all-reduced in buckets while the backward pass still runs.

This is what torch's DistributedDataParallel does, kept small so that names stay, sums stay sums (the loss is divided by
the global count of targets before), and parameters may be sharded by tensor parallelism.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


@dataclass(kw_only=True)
class Bucket:
    """Gradients that are all-reduced together."""

    parameters: list[nn.Parameter]
    waiting: set[nn.Parameter] = field(default_factory=set)  # those whose gradient is not computed yet
    work: dist.Work | None = None


class Replicas:
    """All-reduces gradients over `group`, bucket by bucket in the order in which the backward pass computes them."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, bucket_bytes: int) -> None:
        self.group = group
        self.armed = False
        self.buckets = _buckets([p for p in parameters if p.requires_grad], bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._next = 0
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def arm(self) -> None:
        """The next backward pass is the last of its step: reduce gradients as they get ready."""
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
        """Reduce the buckets that are left, and wait for all."""
        self.armed = False
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Gradients become views of the bucket: nothing is stored twice, and nothing is copied back."""
        flat = torch.cat([_local_gradient(parameter).reshape(-1) for parameter in bucket.parameters])
        for parameter, view in zip(bucket.parameters, _views(flat, bucket.parameters), strict=True):
            _replace_gradient(parameter, view)
        bucket.work = dist.all_reduce(flat, group=self.group, async_op=True)


def _buckets(parameters: list[nn.Parameter], limit: int) -> list[Bucket]:
    """Last layers first; one dtype per bucket."""
    buckets: list[Bucket] = []
    size = 0
    for parameter in reversed(parameters):
        fits = buckets and buckets[-1].parameters[0].dtype == parameter.dtype and size + parameter.nbytes <= limit
        if not fits:
            buckets.append(Bucket(parameters=[]))
            size = 0
        buckets[-1].parameters.append(parameter)
        size += parameter.nbytes
    return buckets


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part; zeros where this rank did not use the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_of(parameter.grad)


def local_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Views into `flat`, each shaped as a parameter's local gradient."""
    targets = [_local_gradient(parameter) for parameter in parameters]
    parts = flat.split([target.numel() for target in targets])
    return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]


def _replace_gradient(parameter: nn.Parameter, view: Tensor) -> None:
    if isinstance(parameter.grad, DTensor):
        parameter.grad._local_tensor = view
    else:
        parameter.grad = view


@torch.no_grad()
def sum_partial(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce the gradients of which each tensor-parallel rank has a partial sum, in one collective."""
    partial = [p for p in parameters if isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements)]
    if not partial:
        return
    flat = torch.cat([local_of(p.grad).reshape(-1) for p in partial if p.grad is not None])
    dist.all_reduce(flat, group=group)
    for parameter, view in zip(partial, _views(flat, partial), strict=True):
        assert isinstance(parameter.grad, DTensor)
        placements = [Replicate() if x.is_partial() else x for x in parameter.grad.placements]
        parameter.grad = DTensor.from_local(view, parameter.grad.device_mesh, placements, run_check=False)
