"""One of several sending processes: takes its job from stdin, says when it is prepared, is told when to begin, and
writes what came back to stdout."""

from __future__ import annotations

import pickle
import struct
import sys

from armillary.serving.load.sender import Job, drive

READY = b"ready\n"
BEGIN = struct.Struct("d")


def main() -> None:
    """`python -m armillary.serving.load.sender_process`, started by multi_process.py, which alone writes to it."""
    job: Job = pickle.load(sys.stdin.buffer)

    def begin() -> float:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        return float(BEGIN.unpack(sys.stdin.buffer.read(BEGIN.size))[0])

    pickle.dump(drive(job, begin), sys.stdout.buffer)


if __name__ == "__main__":
    main()
