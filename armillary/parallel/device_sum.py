"""A one-shot all-reduce of small tensors of ranks on GPUs of one machine that reach each other's memory.

Every rank copies its part where all others can read it and adds up all parts (torch's symmetric memory): one exchange
of flags over NVLink or PCIe instead of NCCL's two passes around a ring, and graphs can capture it. It is for the sums
of tensor parallelism in decode steps; its slow twin is `collectives.all_reduce`, with which it is compared first.
"""

import logging
from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

from armillary.machine.node_id import node_id
from armillary.parallel.collectives import Group, all_gather, all_reduce

LOG = logging.getLogger("armillary.parallel")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHECKED = 4096
_UNIT = 16
"""bytes: what the library's kernel loads at once, and so what a tensor is a multiple of"""


def most_bytes(ranks: int) -> int:
    """Up to which every rank reading all parts takes less than dividing the sum among them."""
    return 4 << 20 if ranks == 2 else 512 << 10 if ranks <= 4 else 256 << 10


class DeviceSum:
    """Called by all ranks with tensors of one shape, in the same order."""

    def __init__(self, buffers: dict[torch.dtype, Tensor], group: Group, otherwise: Callable[[Tensor], Tensor]) -> None:
        """`buffers` that all ranks can read; `otherwise` sums what is longer, uneven or of another dtype."""
        self._buffers, self._group, self._otherwise = buffers, group, otherwise

    def __call__(self, x: Tensor) -> Tensor:
        buffer, x = self._buffers.get(x.dtype), x.contiguous()
        uneven = x.numel() * x.element_size() % _UNIT
        if buffer is None or not 0 < x.numel() <= buffer.numel() or uneven:
            return self._otherwise(x)
        aligned = x.clone() if x.data_ptr() % _UNIT else x  # on this rank alone, maybe: all must choose the same way
        return _one_shot(buffer, aligned, self._group.name)


def _one_shot(buffer: Tensor, x: Tensor, group: str) -> Tensor:
    total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group)
    return total


def device_sum(group: Group, device: torch.device, otherwise: Callable[[Tensor], Tensor]) -> DeviceSum | None:
    """For a group whose ranks each have a GPU of one machine, all within reach of each other; None where some rank has
    not, or where the sums are not those of the process group."""
    if not _all(_can_share(group, device), group, device):
        return None
    buffers = _shared_buffers(group, device)
    if not _all(bool(buffers), group, device):
        return None
    reduce = DeviceSum(buffers, group, otherwise)
    right = [_agrees(reduce, group, device, dtype) for dtype in _DTYPES]  # all of them, on every rank
    return reduce if _all(all(right), group, device) else None


def _all(here: bool, group: Group, device: torch.device) -> bool:
    return bool(all_reduce(torch.tensor([here], dtype=torch.int32, device=device), group, "min").item())


def _can_share(group: Group, device: torch.device) -> bool:
    """Whether all ranks are on this machine, on GPUs of their own that this one reaches."""
    own = device.index or 0
    place = torch.tensor([[crc32(node_id().encode()), own]], device=device)
    places = all_gather(place, group, dim=0).tolist()
    gpus = [gpu for _, gpu in places]
    if len({machine for machine, _ in places}) > 1 or len(set(gpus)) < len(gpus):
        return False
    visible = range(torch.cuda.device_count())
    return all(gpu == own or (gpu in visible and torch.cuda.can_device_access_peer(own, gpu)) for gpu in gpus)


def _shared_buffers(group: Group, device: torch.device) -> dict[torch.dtype, Tensor]:
    """By dtype; none where a driver or a build of torch cannot share memory."""
    from torch.distributed import _symmetric_memory as shared

    buffers = {}
    try:
        for dtype in _DTYPES:
            buffer = shared.empty(most_bytes(group.size) // dtype.itemsize, dtype=dtype, device=device)
            shared.rendezvous(buffer, group.name)
            buffers[dtype] = buffer
    except RuntimeError as error:
        _say_left(error)
        return {}
    return buffers


def _agrees(reduce: DeviceSum, group: Group, device: torch.device, dtype: torch.dtype) -> bool:
    """Numbers that sums of few ranks keep exactly, so that the order of ranks is no matter."""
    part = (torch.arange(_CHECKED, device=device) % 7 + group.rank).to(dtype)
    expected = all_reduce(part, group)
    try:
        return torch.equal(reduce(part), expected)
    except (RuntimeError, AttributeError) as error:  # AttributeError: a build of torch without the operation
        _say_left(error)
        return False


def _say_left(error: Exception) -> None:
    LOG.info("sums over ranks are left to the process group: %s", str(error).partition("\n")[0])
