"""Where the threads of this process are: source lines, and the collective that a rank waits in.

Collectives come from torch's flight recorder, which counts those of gloo and of NCCL; where it is off, from the frame
of the training thread inside torch.distributed, without a sequence number.
"""

from __future__ import annotations

import faulthandler
import pickle
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

from armillary.store.hang_verdict import Collective

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = ("site-packages", "/lib/python", "<frozen", "<string>")
_MOST_FRAMES = 8
_BYTES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}


def own_lines(thread: threading.Thread) -> tuple[str, ...]:
    """Source lines of a thread, innermost first, without those of libraries."""
    frames = list(_frames(thread))
    own = [frame for frame in frames if not _is_library(frame.f_code.co_filename)]
    return tuple(_text(frame) for frame in (own or frames)[:_MOST_FRAMES])


def functions(thread: threading.Thread) -> tuple[str, ...]:
    """The functions that a thread is in: they change while it gets on, and stay while it hangs."""
    return tuple(frame.f_code.co_qualname for frame in _frames(thread))


def loader_line() -> str:
    """Where the thread is that reads batches; empty where there is none."""
    matches = [thread for thread in threading.enumerate() if thread.name == "loader"]
    return next(iter(own_lines(matches[-1])), "") if matches else ""


def is_in_file(thread: threading.Thread, file: str) -> bool:
    """Whether a thread is in a function of a file, named by the end of its path."""
    return any(frame.f_code.co_filename.endswith(file) for frame in _frames(thread))


def collective_in_flight(thread: threading.Thread, *, failed: bool = False) -> Collective | None:
    """The oldest collective that has not ended; None where there is none. `failed`: the last one, which an error has
    ended."""
    entries = _recorded()
    active = [entry for entry in entries if not entry["retired"]]
    if active or (failed and entries):
        return _of_entry(min(active or entries[-1:], key=lambda entry: int(entry["record_id"])))
    for frame in _frames(thread):
        if frame.f_code.co_filename.endswith("distributed/distributed_c10d.py"):
            return Collective(kind=frame.f_code.co_name, line=next(iter(own_lines(thread)), ""))
    return None


@contextmanager
def dumping_crashes(path: Path) -> Iterator[None]:
    """Where C++ code aborts the process or reads a wrong address, leave the source lines of all threads in a file."""
    before = faulthandler.is_enabled()
    with path.open("w") as file:
        faulthandler.enable(file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.disable()
            if before:
                faulthandler.enable()


def crash_lines(path: Path) -> tuple[str, ...]:
    """The main thread's own source lines that `dumping_crashes` left, innermost first; none where it did not crash.
    Threads are listed newest first."""
    if not path.is_file():
        return ()
    last = path.read_text(errors="replace").rpartition("most recent call first")[2]
    matches = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', last)
    own = [line for line in matches if not _is_library(line[0])]
    return tuple(f"{_short(file)}:{line} ({name})" for file, line, name in own[:_MOST_FRAMES])


def _recorded() -> list[Mapping[str, Any]]:
    """Entries of torch's flight recorder, of whichever backends this torch has."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return []
    module = sys.modules["torch._C._distributed_c10d"]
    entries: list[Mapping[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if hasattr(module, name):
            entries += pickle.loads(getattr(module, name)()).get("entries", ())
    return entries


def _of_entry(entry: Mapping[str, Any]) -> Collective:
    sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    lines = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
    own = next((line for line in lines if not _is_library(line[0])), None)
    return Collective(
        kind=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        group=str(entry["process_group"][0]),
        sequence=int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]),
        bytes=sum(prod(size) * _BYTES.get(dtype, 4) for size, dtype in sizes),
        line=f"{_short(own[0])}:{own[1]} ({own[2]})" if own else "",
        members=_members(str(entry["process_group"][0])),
    )


def _members(group: str) -> tuple[int, ...]:
    """Ranks of a process group by its name."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    for each, name in list(world.pg_names.items()):
        if name == group:
            return tuple(world.pg_group_ranks.get(each, ()))
    return ()


def _frames(thread: threading.Thread) -> Iterator[FrameType]:
    """Innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _text(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_library(file: str) -> bool:
    return not file.startswith(_PACKAGE) and any(part in file for part in _LIBRARIES)


def _short(file: str) -> str:
    """The path from the package on, or the last two parts of another's."""
    return (
        str(Path(file).relative_to(Path(_PACKAGE).parent))
        if file.startswith(_PACKAGE)
        else "/".join(Path(file).parts[-2:])
    )
