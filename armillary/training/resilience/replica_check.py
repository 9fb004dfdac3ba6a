"""The check that replicas are equal: a bit that flips in one rank's memory makes it train another model, silently.

Each rank sums the bits of every tensor that a checkpoint would hold; ranks that hold the same part of the same tensor
must have the same sum. One flipped bit always changes it. `train.replica_check_every` says how often;
every checkpoint on disk is preceded by a check.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(tensors: Mapping[str, Tensor], ranks: Consensus, step: int, *, saved: int = -1) -> None:
    """Raise on all ranks where one differs from its replicas; nothing is compared on one rank. `saved` is the step of
    the last checkpoint, -1 where there is none."""
    if ranks.size == 1:
        return
    differing = differing_ranks(ranks.gather(bit_sums(tensors)))
    if not differing:
        return
    name, wrong = next(iter(differing.items()))
    who = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
    more = f" and {len(differing) - 1} more tensors" if len(differing) > 1 else ""
    ranks.raise_first(
        ArmillaryError(
            f"after step {step} {name.partition('@')[0]}{more} of {who} differs from its replicas: a bit flipped in "
            f"memory, or ranks computed differently; train again without that machine: the run {_continues(saved)}"
        )
    )


def _continues(saved: int) -> str:
    return f"continues from checkpoint {saved:,}" if saved > 0 else "starts from the beginning"


def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """'name@offset' of this rank's part of each tensor -> sum of its elements as integers, modulo 2^64."""
    parts = {f"{name}@{_offset(value)}": _local(value) for name, value in tensors.items()}
    sums = [part.contiguous().view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in parts.values()]
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for number, value in enumerate(sums):
        by_device[value.device].append(number)
    totals = [0] * len(sums)
    for numbers in by_device.values():  # one copy to the host per device
        for number, total in zip(numbers, torch.stack([sums[i] for i in numbers]).tolist(), strict=True):
            totals[number] = total
    return dict(zip(parts, totals, strict=True))


def differing_ranks(sums: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Part of a tensor -> ranks that differ from most of those that hold it; both where there are two."""
    holders: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, own in enumerate(sums):
        for name, total in own.items():
            holders[name][rank] = total
    differing: dict[str, list[int]] = {}
    for name, by_rank in holders.items():
        (usual, times), *_ = Counter(by_rank.values()).most_common(1)
        if times < len(by_rank):
            tied = 2 * times <= len(by_rank)
            differing[name] = [rank for rank, total in by_rank.items() if tied or total != usual]
    return differing


def _local(value: Tensor) -> Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().reshape(-1) if local.ndim == 0 else local.detach()


def _offset(value: Tensor) -> str:
    """Where this rank's part begins in the full tensor."""
    if not isinstance(value, DTensor):
        return ""
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return ",".join(map(str, offset))
