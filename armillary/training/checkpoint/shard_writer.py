"""Writes the file of one rank from its staging buffer, in a process of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from armillary.training.checkpoint.container import container
from armillary.training.checkpoint.save_plan import Place
from armillary.training.checkpoint.staging import StagingBuffer
from armillary.training.checkpoint.worker_process import WorkerProcess


class ShardWriter:
    """Created by the thread that uses it, with which the process ends."""

    def __init__(self, buffer: StagingBuffer, places: Sequence[Place]) -> None:
        layout = {"size": buffer.size, "items": [_item(place) for place in places]}
        self.process = WorkerProcess(buffer.fd, layout)

    def write(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Size and checksum of the file that was written, or errno and error."""
        return self.process.ask(job)

    def close(self, *, kill: bool = False) -> None:
        self.process.close(kill=kill)


def _item(place: Place) -> list[int]:
    """Begin and bytes of a tensor in the file, bytes of one number, and where its CRC-32 belongs."""
    wrapper = container(place.chunk.sizes, place.chunk.dtype)
    end = place.data + place.chunk.bytes
    return [place.data, place.chunk.bytes, place.chunk.dtype.itemsize, *(end + at for at in wrapper.crc_at)]
