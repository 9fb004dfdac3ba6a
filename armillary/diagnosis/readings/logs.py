"""Other people's training logs as Readings: torchtitan, Megatron-LM, the Hugging Face Trainer, told by their lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from armillary.diagnosis.readings.hf_trainer import is_trainer, is_trainer_state, read_trainer, read_trainer_state
from armillary.diagnosis.readings.log_lines import plain_lines
from armillary.diagnosis.readings.megatron import is_megatron, read_megatron
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.torchtitan import is_torchtitan, read_torchtitan
from armillary.errors import BadData, NotFound

READS = "torchtitan, Megatron-LM or Hugging Face Trainer output, or a trainer_state.json"
_READERS = ((is_torchtitan, read_torchtitan), (is_megatron, read_megatron), (is_trainer, read_trainer))
_MOST_BYTES = 200_000_000


def is_log(path: Path) -> bool:
    """Whether a file holds lines of one of the known trainers."""
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return False
    text = path.read_text(errors="replace")
    if _state(text) is not None:
        return True
    lines = plain_lines(text)
    return any(is_it(lines) for is_it, _ in _READERS)


def read_log(path: Path) -> Reading:
    """What a log says of its steps."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise NotFound(f"no file {path}; give {READS}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); give {READS}") from None
    if (state := _state(text)) is not None:
        return _noted(read_trainer_state(state, str(path)))
    lines = plain_lines(text)
    for is_it, read in _READERS:
        if is_it(lines):
            return _noted(read(lines, str(path)))
    raise BadData(f"{path} holds no line that is known here; give {READS}")


def _noted(reading: Reading) -> Reading:
    """With what a log cannot tell."""
    told = "a log says when steps were slow, not why: a trace of some steps says more (torch.profiler)"
    return replace(reading, notes=(*reading.notes, told))


def _state(text: str) -> dict[str, object] | None:
    if not text.lstrip().startswith("{") or '"log_history"' not in text:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if is_trainer_state(value) else None
