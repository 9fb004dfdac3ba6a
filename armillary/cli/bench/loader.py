"""What `bench loader` feeds from: prepared token shards, as training reads them, and as plain as they can be read.

Both are small objects that pickle, because loader workers are other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from armillary.profiling.ceilings.data_loader import LoaderSettings
    from armillary.training.data.batch_sources import Batches


@dataclass(frozen=True, kw_only=True)
class TrainingBatches:
    """Batches of prepared shards, exactly as a training step gets them: `batch` shuffled rows of `sequence` tokens with
    targets, positions and documents."""

    folder: Path
    sequence: int
    batch: int

    def __call__(self, worker: int, workers: int) -> Iterator[Any]:
        batches = self.open()
        return (batches.at(step) for step in count(worker, workers))

    def open(self) -> Batches:
        from armillary.training.data.batch_sources import Batches
        from armillary.training.data.shards import TokenShards

        return Batches(shards=TokenShards.open(self.folder), sequence=self.sequence, batch=self.batch)


def through_loader(
    reading: TrainingBatches, settings: LoaderSettings, device: torch.device
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The batches as training's own loader hands them over."""
    import torch

    from armillary.training.data.batch import LAYOUT
    from armillary.training.data.loader import Loader

    shape: dict[str, Any] = {"rank": 0, "world": 1, "workers": settings.workers, "start": 0, "stop": 2**62}
    with Loader(reading.open(), device=device, **shape) as loader:
        for step in count():
            batch = loader.at(step)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield {name: getattr(batch, name) for name in LAYOUT}


class PlainReads(TrainingBatches):
    """The same number of ids, straight from the memory-mapped files in their order: what the path costs beyond this is
    shuffling and packing."""

    def __call__(self, worker: int, workers: int) -> Iterator[Any]:
        from armillary.training.data.shards import TokenShards

        shards = TokenShards.open(self.folder)
        size = min(self.sequence * self.batch, shards.num_tokens)
        places = shards.num_tokens - size + 1
        return (shards.read(number * size % places, size) for number in count(worker, workers))
