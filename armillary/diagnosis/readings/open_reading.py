"""Whatever a person points at, as a Reading: a run, gauges.jsonl, a server's address, a trace, another's log."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from armillary.diagnosis.readings.autoscaler_log import is_autoscaler_log, read_autoscaler_log
from armillary.diagnosis.readings.deepspeed import is_deepspeed, read_deepspeed
from armillary.diagnosis.readings.device_csv import is_device_csv, read_device_csv
from armillary.diagnosis.readings.hf_trainer import is_trainer, parse_trainer_state, read_trainer, read_trainer_state
from armillary.diagnosis.readings.job_events import (
    is_kubernetes_events,
    is_sacct,
    read_kubernetes_events,
    read_sacct,
)
from armillary.diagnosis.readings.lightning import is_lightning, read_lightning
from armillary.diagnosis.readings.log_lines import plain_lines
from armillary.diagnosis.readings.megatron import is_megatron, read_megatron
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import read_gauges_file, read_run
from armillary.diagnosis.readings.torchtitan import is_torchtitan, read_torchtitan
from armillary.errors import BadData, NotFound
from armillary.store.home import Home
from armillary.store.runs import find_run, is_run_folder

READS = "output of torchtitan, Megatron-LM, DeepSpeed, Lightning or the Hugging Face Trainer, or a trainer_state.json"
_READERS = (
    (is_torchtitan, read_torchtitan),
    (is_megatron, read_megatron),
    (is_trainer, read_trainer),  # which may run on DeepSpeed, and says more
    (is_deepspeed, read_deepspeed),
    (is_lightning, read_lightning),
)
_MOST_BYTES = 200_000_000


def is_log(path: Path) -> bool:
    """Whether a file holds lines of one of the known trainers."""
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return False
    return _reader_of(path.read_text(errors="replace")) is not None


def read_log(path: Path) -> Reading:
    """What a log says of its steps."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise NotFound(f"no file {path}; give {READS}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); give {READS}") from None
    read = _reader_of(text)
    if read is None:
        raise BadData(f"{path} holds no line that is known here; give {READS}")
    reading = read(str(path))
    note = "a log says when steps were slow, not why: a trace of some steps says more (torch.profiler)"
    return replace(reading, notes=(*reading.notes, note))


def _reader_of(text: str) -> Callable[[str], Reading] | None:
    """read(source) for a text of one of the known trainers."""
    if (state := parse_trainer_state(text)) is not None:
        return partial(read_trainer_state, state)
    lines = plain_lines(text)
    return next((partial(read, lines) for is_it, read in _READERS if is_it(lines)), None)


_KNOWN = (
    "gauges.jsonl, a torch-profiler or nsys trace, a metrics page of vLLM, SGLang, TGI, Triton or dcgm-exporter, "
    "CSV of nvidia-smi, "
    "an autoscaler's decisions.jsonl, output of sacct or kubectl get events, or a log "
    "of torchtitan, Megatron, DeepSpeed, Lightning or the Hugging Face Trainer"
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
    if (path / "gauges.jsonl").is_file() and not is_run_folder(path):
        return read_gauges_file(path / "gauges.jsonl")
    try:
        run = find_run(home, target)
    except NotFound:
        if "/" in target or "." in target:
            raise NotFound(f"no file or run '{target}'; give a run, gauges.jsonl, a trace, a log or a URL") from None
        raise
    return read_run(run, home)


def _read_file(path: Path, home: Home) -> Reading:
    """By how it begins: a trace may be too large to be looked through for lines of a log."""
    from armillary.diagnosis.readings.from_profile import read_profiled
    from armillary.diagnosis.readings.metrics_page import is_page, read_metrics

    with path.open("rb") as file:
        head = file.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
    text = head.decode(errors="replace")
    if is_sacct(text):
        return read_sacct(path.read_text(errors="replace"), str(path))
    if is_kubernetes_events(text):
        return read_kubernetes_events(path.read_text(errors="replace"), str(path))
    if is_autoscaler_log(text):
        return read_autoscaler_log(path)
    if path.suffix == ".jsonl" or head.startswith(b'{"time":'):
        return read_gauges_file(path)
    if head.startswith(_BINARY) or (_JSON.match(head) and not _STATE.search(head)):
        return read_profiled(path, home)
    if is_device_csv(text):
        return read_device_csv(path.read_text(encoding="utf-8-sig", errors="replace"), str(path))
    if is_page(path):
        return read_metrics(str(path), home)
    if is_log(path):
        return read_log(path)
    raise BadData(f"{path} is nothing that is known here; give {_KNOWN}")
