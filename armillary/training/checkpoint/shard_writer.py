"""Writes the checkpoint files of one rank from its staging buffer, or uploads them, in a process beside the rank
(shard_writer_process.py): started once, given jobs over a pipe, and replaced when it dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import armillary
from armillary.training.checkpoint.container import container
from armillary.training.checkpoint.save_plan import Place
from armillary.training.checkpoint.staging import StagingBuffer

MODULE = "armillary.training.checkpoint.shard_writer_process"
_STARTS = 3
"""times a process that dies during one job is started"""


class ShardWriter:
    """The rank's end of it. The process ends when the thread that made this does."""

    def __init__(self, fd: int | None = None, layout: Mapping[str, Any] | None = None) -> None:
        """`fd` is a staging buffer with this `layout`; uploads need none."""
        self._fd, self._layout, self._ended = fd, layout, False
        self._process = self._start()

    @classmethod
    def of(cls, buffer: StagingBuffer, places: Sequence[Place]) -> ShardWriter:
        return cls(buffer.fd, {"size": buffer.size, "items": [_item(place) for place in places]})

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run a job to its end: size and checksum of the file that was written, or parts that were uploaded; else errno
        and error. OSError where the process dies again and again."""
        for _ in range(_STARTS):
            try:
                return self._ask(job)
            except (OSError, ValueError):
                if self._ended:
                    break
                self._end(kill=True)
                self._process = self._start()
        raise OSError(None, "the process that writes it was killed")

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise OSError("no answer")
        return dict(json.loads(line))

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(armillary.__file__).parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(os.getpid()), *([] if self._fd is None else [str(self._fd)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=() if self._fd is None else (self._fd,),
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"layout": self._layout or {}}) + "\n")
        process.stdin.flush()
        return process

    def close(self, *, kill: bool = False) -> None:
        """Wait for the process to end, or `kill` it with the job that it runs."""
        self._ended = True
        self._end(kill=kill)

    def _end(self, *, kill: bool) -> None:
        if kill:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # of what is left to send to a process that is gone
                pipe.close()
        self._process.wait()


def _item(place: Place) -> list[int]:
    """Begin and bytes of a tensor in the file, bytes of one number, and where its CRC-32 belongs."""
    wrapper = container(place.chunk.sizes, place.chunk.dtype)
    end = place.data + place.chunk.bytes
    return [place.data, place.chunk.bytes, place.chunk.dtype.itemsize, *(end + at for at in wrapper.crc_at)]
