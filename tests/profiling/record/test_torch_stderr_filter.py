"""torch's line about memory that was allocated before a recording: not shown, and nothing else is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from armillary.profiling.record import trace_recorder
from armillary.profiling.record.trace_recorder import freed_unknown_block

RECORDED = """
import contextlib, torch
from armillary.profiling.record.trace_recorder import freed_unknown_block

held = [torch.ones(100) for _ in range(20)]
own = torch.profiler.profile(profile_memory=True)
with {around}():
    own.start()
del held
own.stop()
"""


class Loud:
    """Says what torch says when it is freed, and something else."""

    def __del__(self) -> None:
        os.write(2, b"[W CPUAllocator] Memory block of unknown size was allocated before the start\nanother line\n")


def test_only_that_line_is_left_out(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trace_recorder, "torch", SimpleNamespace(empty=lambda size: Loud()))
    with freed_unknown_block():
        os.write(2, b"before\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nanother line\nafter\n"


@pytest.mark.slow
@pytest.mark.parametrize(("around", "said"), [("contextlib.nullcontext", True), ("freed_unknown_block", False)])
def test_what_torch_says(around: str, said: bool) -> None:
    line = [sys.executable, "-W", "ignore", "-c", RECORDED.format(around=around)]
    assert ("unknown size" in subprocess.run(line, capture_output=True, text=True, check=True).stderr) == said
