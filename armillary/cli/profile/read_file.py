"""What `armillary profile` reads: a trace from anywhere or a profile that --json printed, told by how it begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.errors import BadInput, NotFound
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.profiling.profile import Profile

_HEAD = 4096
_BEGINNINGS = (b"{", b"[", b"\x1f\x8b", b"SQLite format 3\x00")
"""JSON, gzip, and an nsys export"""
_NAMES = (".json", ".json.gz", ".gz", ".sqlite")


def is_readable(name: str) -> bool:
    """Whether a name stands for a trace or a profile: by its ending, else by what is in the file."""
    return name.endswith(_NAMES) or _head(Path(name)).startswith(_BEGINNINGS)


def read_file(path: Path, home: Home) -> Profile:
    """A profile; of a trace, held against the roofline of the device it names."""
    from armillary.profiling.analysis.analyse import analyse, device_name
    from armillary.profiling.analysis.roofline import roofline_for
    from armillary.profiling.trace.read_trace import read_trace

    if _holds_profile(path):
        return _read_profile(path)
    trace = read_trace(path)
    memory = trace.device_bytes[0] if trace.device_bytes else None
    return analyse(trace, roofline=roofline_for(device_name(trace), home, memory), source=str(path))


def check_folder(option: str, path: Path) -> None:
    """What is to be written at the end is refused at the beginning."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise NotFound(f"no folder {folder} for {option} {path}; make it, or name another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise BadInput(f"{option} {path} cannot be written; name another file")


def _read_profile(path: Path) -> Profile:
    """What --json printed, also with --compare, where the profile stands beside the comparison."""
    from armillary.profiling.profile import Profile

    text = path.read_text()
    if _head(path)[1:].lstrip().startswith(b'"profile"'):
        try:
            text = json.dumps(json.loads(text).get("profile"))
        except ValueError as error:
            raise BadInput(f"{path} is not JSON ({error}); profile again") from None
    return Profile.from_json(text, str(path))


def _holds_profile(path: Path) -> bool:
    """Told from its beginning: a trace may be too large to read twice."""
    head = _head(path)
    return head.startswith(b"{") and b'"wall_s"' in head and b'"traceEvents"' not in head


def _head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
