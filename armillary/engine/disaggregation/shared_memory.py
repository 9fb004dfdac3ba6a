"""Memory that two processes of one host share, for blocks that need not pass through a socket.

The prefill side owns a memfd, divided into slots of one frame each, and says in its HELLO where to find it; a decode
side that can open it reads frames where they lie, and says when it is done with a slot. It is sealed against shrinking,
so a reader that has checked its size cannot run off its end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from pathlib import Path
from threading import Lock

import torch

from armillary.engine.disaggregation.wire import PeerGone

_NAME = "armillary-kv"


class SharedSlots:
    """The owner's side: slots to write into, made when they are first needed. Any thread may call."""

    def __init__(self, slot_bytes: int, most_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._most = max(1, most_bytes // self.slot_bytes)
        self._memory: list[torch.Tensor] = []
        self._free: list[int] = []
        self._lock = Lock()
        self._offered = False
        self._closed = False

    def offer(self) -> bytes:
        """For the HELLO: where a process of this host finds the memory. The inode tells whether it found the right one:
        in another container the same path is another file, or none."""
        return f"{os.getpid()} {self._fd} {os.fstat(self._fd).st_ino} {self.slot_bytes}".encode()

    def accepted(self) -> None:
        """The other side has opened it."""
        self._offered = True

    def take(self) -> tuple[int, torch.Tensor] | None:
        """(number, memory) of a free slot; None where all are in use, or the other side cannot see them."""
        with self._lock:
            if self._closed or not self._offered:
                return None
            if not self._free:
                number = len(self._memory)
                if number >= self._most:
                    return None
                os.ftruncate(self._fd, (number + 1) * self.slot_bytes)
                mapped = mmap.mmap(self._fd, self.slot_bytes, offset=number * self.slot_bytes)
                self._memory.append(torch.frombuffer(mapped, dtype=torch.uint8))
                self._free.append(number)
            number = self._free.pop()
            return number, self._memory[number]

    def give_back(self, number: int) -> None:
        with self._lock:
            self._free.append(number)

    def close(self) -> None:
        """Let the memory go once nobody uses it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)


class SharedFrames:
    """The reader's side."""

    def __init__(self, fd: int, slot_bytes: int) -> None:
        self._fd, self._slot_bytes = fd, slot_bytes
        self._mapped: dict[int, memoryview] = {}

    @classmethod
    def opened(cls, offer: bytes) -> SharedFrames | None:
        """None where the other side offers nothing, or is on another host or in another container."""
        fields = offer.split()
        if sys.platform != "linux" or len(fields) != 4 or not all(field.isdigit() for field in fields):
            return None
        pid, number, inode, slot_bytes = map(int, fields)
        path = Path(f"/proc/{pid}/fd/{number}")
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if os.fstat(fd).st_ino != inode or not sealed or not slot_bytes or slot_bytes % mmap.PAGESIZE:
            os.close(fd)
            return None
        return cls(fd, slot_bytes)

    def frame(self, slot: int, size: int) -> memoryview:
        if slot not in self._mapped:
            begin = slot * self._slot_bytes
            if begin + self._slot_bytes > os.fstat(self._fd).st_size:
                raise PeerGone("it named memory that is not there")
            self._mapped[slot] = memoryview(mmap.mmap(self._fd, self._slot_bytes, offset=begin))
        if size > self._slot_bytes:
            raise PeerGone("it named memory that is not there")
        return self._mapped[slot][:size]

    def close(self) -> None:
        """Frames that are still in use keep their memory."""
        self._mapped.clear()
        os.close(self._fd)
