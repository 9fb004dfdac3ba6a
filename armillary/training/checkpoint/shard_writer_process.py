"""The process that writes one rank's checkpoint files, beside training: `python -m …shard_writer_process PARENT [FD]`.

It maps the rank's staging buffer, hashes each block while it writes it, and reports sizes and checksums; or it uploads
files to a store. Jobs come in as lines of JSON, and so do the answers. It imports neither torch nor other parts of the
package before it needs them, so that it starts at once, and it ends with its rank.
"""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import signal
import struct
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BLOCK = 16 << 20
"""the blocks of a manifest's block_sha256"""
RETRIES_S = (0.2, 1.0, 4.0, 10.0)
"""waits before a failed write is tried again"""
PERMANENT = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}
_NICE, _DIE_WITH_PARENT = 10, 1


def main() -> None:
    end_with(int(sys.argv[1]))
    os.nice(_NICE)
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    descriptor = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    with mmap.mmap(descriptor, 0 if descriptor >= 0 else 1) as buffer, ThreadPoolExecutor(threads) as pool:
        layout: dict[str, Any] = {}
        for line in sys.stdin:
            job = json.loads(line)
            if "layout" in job:
                layout = job["layout"]
                continue
            answer = upload(job) if "upload" in job else run(job, layout, buffer, pool)
            print(json.dumps(answer), flush=True)


def end_with(parent: int) -> None:
    """Be killed when the rank ends, so that nothing is written for a rank that is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then waits for this
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run(job: dict[str, Any], layout: dict[str, Any], buffer: mmap.mmap, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """One file; errors that may pass are tried again."""
    begin = time.perf_counter()
    view = memoryview(buffer)
    try:
        for wait_s in (*RETRIES_S, None):
            try:
                done = attempt(job, layout, view, pool)
                return done | {"seconds": time.perf_counter() - begin}
            except OSError as error:
                if wait_s is None or error.errno in PERMANENT:
                    return {"errno": error.errno, "error": error.strerror or str(error)}
                time.sleep(wait_s)
        raise AssertionError("the last try returns")
    finally:
        view.release()


def attempt(job: dict[str, Any], layout: dict[str, Any], view: memoryview, pool: ThreadPoolExecutor) -> dict[str, Any]:
    if "base" in job:
        return write_delta(job["path"], job["base"], view, layout["items"], pool)
    fill_checksums(view, layout["items"], pool)
    digest = write(job["path"], view[: layout["size"]], pool)
    return {"bytes": layout["size"], "block_sha256": digest}


def fill_checksums(view: memoryview, items: list[list[int]], pool: ThreadPoolExecutor) -> None:
    """The CRC-32 of each tensor, in its container's two places."""

    def fill(item: list[int]) -> None:
        data, size, _, *places = item
        value = struct.pack("<I", zlib.crc32(view[data : data + size]))
        for place in places:
            view[place : place + 4] = value

    list(pool.map(fill, items))


def write(path: str, view: memoryview, pool: ThreadPoolExecutor) -> str:
    """Write and sync a file; returns its block_sha256."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        blocks = pool.map(lambda at: write_block(descriptor, view[at : at + BLOCK], at), range(0, len(view), BLOCK))
        digest = hashlib.sha256(b"".join(blocks)).hexdigest()
        os.fsync(descriptor)
        return digest
    finally:
        os.close(descriptor)


def write_block(descriptor: int, block: memoryview, at: int) -> bytes:
    """Write a block, and return its hash."""
    done = 0
    while done < len(block):
        done += os.pwrite(descriptor, block[done:], at + done)
    return hashlib.sha256(block).digest()


def upload(job: dict[str, Any]) -> dict[str, Any]:
    """Send files to a store; the parts of each, or why not."""
    from armillary.errors import ArmillaryError
    from armillary.training.checkpoint.upload import upload_files

    try:
        return {"parts": upload_files(job["upload"], job["paths"])}
    except ArmillaryError as error:
        return {"error": str(error)}
    except OSError as error:  # of the local file
        return {"error": f"{error.filename} cannot be read ({error.strerror})"}
    except Exception as error:
        return {"error": f"it cannot be sent ({type(error).__name__}: {error})"}


# --- deltas


def write_delta(
    path: str, base: str, view: memoryview, items: list[list[int]], pool: ThreadPoolExecutor
) -> dict[str, Any]:
    """Write each tensor as a difference to its bytes in the file `base`, which has the same layout."""
    from armillary.training.checkpoint import delta

    earlier = os.open(base, os.O_RDONLY)
    try:
        with open(path, "wb") as file:
            hashed, places, written = BlockHash(), [], 0
            for data, size, width, *_ in items:
                parts = pool.map(
                    lambda part, data=data, width=width: delta.encode(
                        view[data + part[0] : data + part[1]],
                        os.pread(earlier, part[1] - part[0], data + part[0]),
                        width,
                    ),
                    delta.pieces(size),
                )
                item = delta.join(list(parts))
                places.append([written, len(item)])
                written += file.write(item)
                hashed.update(item)
            file.flush()
            os.fsync(file.fileno())
            return {"bytes": written, "block_sha256": hashed.hexdigest(), "places": places}
    finally:
        os.close(earlier)


class BlockHash:
    """block_sha256 of bytes that come one after the other."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._block, self._held = hashlib.sha256(), 0

    def update(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            taken = min(len(view), BLOCK - self._held)
            self._block.update(view[:taken])
            self._held, view = self._held + taken, view[taken:]
            if self._held == BLOCK:
                self._finish_block()

    def hexdigest(self) -> str:
        if self._held:
            self._finish_block()
        return hashlib.sha256(b"".join(self._digests)).hexdigest()

    def _finish_block(self) -> None:
        self._digests.append(self._block.digest())
        self._block, self._held = hashlib.sha256(), 0


if __name__ == "__main__":
    main()
