"""One of several sending processes: reads its job from stdin, reports that it is prepared, waits for the start time,
and writes its results to stdout."""

from __future__ import annotations

import pickle
import struct
import sys

from armillary.serving.load.sender import SendJob, send_requests

READY = b"ready\n"
BEGIN = struct.Struct("d")


def main() -> None:
    """`python -m armillary.serving.load.sender_process`, started by multi_process.py, which alone writes to it."""
    job: SendJob = pickle.load(sys.stdin.buffer)

    def begin() -> float:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        return float(BEGIN.unpack(sys.stdin.buffer.read(BEGIN.size))[0])

    pickle.dump(send_requests(job, begin), sys.stdout.buffer)


if __name__ == "__main__":
    main()
