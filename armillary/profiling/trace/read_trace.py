"""Reading a trace file: torch-profiler (Kineto) JSON, plain or gzipped, or Nsight Systems' SQLite; without torch."""

from pathlib import Path

from armillary.errors import BadData, NotFound
from armillary.profiling.trace import kineto, nsys
from armillary.profiling.trace.trace import Trace

_SQLITE, _GZIP = b"SQLite format 3\x00", b"\x1f\x8b"


def read_trace(path: str | Path) -> Trace:
    """The trace in a file; the format is detected."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        raise NotFound(f"no trace {path}; record one with armillary profile") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); give a trace file") from None
    if not head:
        raise BadData(f"{path} is empty; record the trace again")
    trace = nsys.read(path) if head.startswith(_SQLITE) else kineto.read(path, gzipped=head.startswith(_GZIP))
    if not len(trace):
        raise BadData(f"{path} holds no operator and no kernel; record it with torch.profiler around some work")
    return trace
