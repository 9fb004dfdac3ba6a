"""Speed of a data loader: batches read in process, by workers, prefetched, and copied to the device.

A factory makes the batches; it is called in every worker with the worker's number and their count, so that each reads
its own share. Start-up is left out: the clock runs from the first batch on.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from multiprocessing.util import Finalize
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from armillary.errors import BadData

Factory = Callable[[int, int], Iterable[Any]]
"""(worker, workers) -> batches: mappings or dataclasses of arrays, or arrays; must pickle where workers are used"""
Watch = Callable[[int, int, str], None]
OpenLoader = Callable[[Any, "LoaderSettings", torch.device], Iterator[Mapping[str, torch.Tensor]]]
"""(factory, settings, device) -> batches as they arrive, without end"""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """One configuration of the loader: reading processes (0: the training process itself), batches that each
    prefetches, pinned memory, and the copy to the device."""

    workers: int = 0
    prefetch: int = 2
    pinned: bool = False
    to_device: bool = False

    def text(self) -> str:
        ahead = f", {self.prefetch} ahead" if self.workers else ""
        how = [name for name, on in (("pinned", self.pinned), ("to device", self.to_device)) if on]
        return ", ".join([f"{self.workers} workers{ahead}", *how])


@dataclass(frozen=True, kw_only=True)
class LoaderSpeed:
    """Speed of one configuration: the median of one batch, and rates over the whole time."""

    settings: LoaderSettings
    batches: int
    seconds: float
    tokens_per_s: float
    bytes_per_s: float


def measure_loader(
    factory: Factory,
    configurations: Sequence[LoaderSettings],
    *,
    device: torch.device,
    budget_s: float = 2.0,
    watch: Watch = lambda done, total, what: None,
    feed: OpenLoader | None = None,
) -> list[LoaderSpeed]:
    """Time each configuration for about `budget_s`, with torch's DataLoader or another `feed`."""
    points = []
    for number, settings in enumerate(configurations):
        watch(number, len(configurations), settings.text())
        points.append(_timed((feed or _batches)(factory, settings, device), settings, budget_s))
    watch(len(configurations), len(configurations), "done")
    return points


def _timed(batches: Iterator[Mapping[str, torch.Tensor]], settings: LoaderSettings, budget_s: float) -> LoaderSpeed:
    if next(batches, None) is None:
        raise BadData("the data path gave no batch; prepare more text or use shorter sequences")
    ends, tokens, num_bytes = [time.perf_counter()], 0, 0
    for batch in batches:
        tokens, num_bytes = tokens + _tokens(batch), num_bytes + _bytes(batch)
        ends.append(time.perf_counter())
        if ends[-1] - ends[0] >= budget_s:
            break
    if len(ends) < 2:
        raise BadData("the data path gave one batch only; prepare more text or use shorter sequences")
    took = ends[-1] - ends[0]
    each = [end - begin for begin, end in pairwise(ends)]
    return LoaderSpeed(
        settings=settings,
        batches=len(each),
        seconds=median(each),
        tokens_per_s=tokens / took,
        bytes_per_s=num_bytes / took,
    )


def _batches(factory: Factory, settings: LoaderSettings, device: torch.device) -> Iterator[Mapping[str, torch.Tensor]]:
    ahead: dict[str, Any] = {}
    if settings.workers:
        ahead = {
            "prefetch_factor": settings.prefetch,
            "multiprocessing_context": "spawn",
            "worker_init_fn": _end_at_once,
        }
    loader = DataLoader(
        _Reading(factory), batch_size=None, num_workers=settings.workers, pin_memory=settings.pinned, **ahead
    )
    for batch in loader:
        if settings.to_device:
            batch = {name: array.to(device, non_blocking=settings.pinned) for name, array in batch.items()}
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        yield batch


def _end_at_once(worker: int) -> None:
    """When a worker's queues are closed, end it there: threads of a GPU build of torch abort an ordinary exit."""
    Finalize(None, os._exit, args=(0,), exitpriority=-100)


class _Reading(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
    """The factory's batches as tensors; made in the worker that reads them."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return map(as_tensors, self._factory(worker, workers))


def as_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """A mapping, dataclass or array of numpy as named tensors."""
    if is_dataclass(batch) and not isinstance(batch, type):
        arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    else:
        arrays = dict(batch) if isinstance(batch, Mapping) else {"tokens": batch}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """Elements of the array that holds tokens, or of the first one."""
    name = next((name for name in batch if name.startswith("tokens")), next(iter(batch)))
    return int(batch[name].numel())


def _bytes(batch: Mapping[str, torch.Tensor]) -> int:
    return sum(array.numel() * array.element_size() for array in batch.values())
