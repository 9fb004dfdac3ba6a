"""Kernels compiled for chips that are not here fit their shared memory; a few always, all of them with -m slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from armillary.machine.accelerator import SHARED_BYTES

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")


def compiled(number: str, *names: str) -> dict[str, Any]:
    where = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compile_for", number, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=where, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_fits(number: str, *names: str) -> None:
    limit, found = SHARED_BYTES[int(number[:-1]), int(number[-1])], compiled(number, *names)
    assert found
    over = {
        name: made
        for name, made in found.items()
        if not isinstance(made, list) or not made or any(size > limit for _, size, _ in made)
    }
    assert over == {}


def test_the_smallest_shared_memory_holds_what_serving_needs() -> None:
    """8.6 has 99 KB; each of these took more before tiles were chosen by it, or is new."""
    assert_fits("86", "grouped, pointers, few rows", "small linear 64 × 1024", "prefill 256")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("attention 64, window 128, Hopper", 16),  # of the query kernel; the others: none
        ("attention 64, narrow window, 8 heads share keys", 0),
        ("large linear of 192 rows, Hopper", 0),
        ("large linear of 192 rows, stream-K, Hopper", 48),  # numbers of a segment, between segments
        ("attention 128, documents", 144),  # in the loop over masked blocks, of which there are one or two per head
    ],
)
def test_hopper_s_kernels_keep_to_their_registers(name: str, most: int) -> None:
    """Bytes per thread that are spilled."""
    found = compiled("90", name)[name]
    assert isinstance(found, list) and found, found
    assert {kernel: stack for kernel, _, stack in found if stack > most} == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", ["80", "86", "89", "90", "100", "120"])
def test_every_kernel_fits_every_chip(number: str) -> None:
    assert_fits(number)
