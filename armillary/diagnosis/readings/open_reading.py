"""Whatever a person points at, as a Reading: a run, gauges.jsonl, a server's address, a trace, another's log."""

from __future__ import annotations

import re
from pathlib import Path

from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import read_gauges_file, read_run
from armillary.errors import BadData, NotFound
from armillary.store.home import Home
from armillary.store.runs import Run, find_run, is_run_folder

_KNOWN = (
    "gauges.jsonl, a torch-profiler or nsys trace, a metrics page of vLLM, SGLang or TGI, or a log of "
    "torchtitan, Megatron or the Hugging Face Trainer"
)
_HEAD = 65_536
_BINARY = (b"\x1f\x8b", b"SQLite format 3\x00")
_JSON = re.compile(rb'\{\s*"|\[\s*\{')
"""not {'loss': … of a log, nor [rank0]: …"""
_STATE = re.compile(rb'"(log_history|best_metric|best_model_checkpoint)"')
"""what a trainer_state.json begins with"""


def open_reading(target: str, home: Home) -> Reading:
    """A run by name or folder, a file by what is in it, a URL by its metrics page."""
    if target.startswith(("http://", "https://")):
        from armillary.diagnosis.readings.metrics_page import read_metrics

        return read_metrics(target, home)
    path = Path(target).expanduser()
    if path.is_file():
        return _read_file(path, home)
    if path.is_dir() and not is_run_folder(path):
        inside = path / "gauges.jsonl"
        if inside.is_file():
            return read_gauges_file(inside)
    return read_run(_found(target, home), home)


def _found(target: str, home: Home) -> Run:
    try:
        return find_run(home, target)
    except NotFound as error:
        if "/" in target or "." in target:
            raise NotFound(f"no file or run '{target}'; give a run, gauges.jsonl, a trace, a log or a URL") from None
        raise error


def _read_file(path: Path, home: Home) -> Reading:
    """By how it begins: a trace may be too large to be looked through for lines of a log."""
    from armillary.diagnosis.readings.from_profile import read_profiled
    from armillary.diagnosis.readings.logs import is_log, read_log
    from armillary.diagnosis.readings.metrics_page import is_page, read_metrics

    with path.open("rb") as file:
        head = file.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
    if path.suffix == ".jsonl" or head.startswith(b'{"time":'):
        return read_gauges_file(path)
    if head.startswith(_BINARY) or (_JSON.match(head) and not _STATE.search(head)):
        return read_profiled(path, home)
    if is_page(path):
        return read_metrics(str(path), home)
    if is_log(path):
        return read_log(path)
    raise BadData(f"{path} is nothing that is known here; give {_KNOWN}")
