"""The soak benchmark, shortly: adapters, drafts, clients that leave and a killed rank lose and repeat no token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the engine's ranks in /proc")
def test_a_minute_of_everything_at_once(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks.engine_soak", "--minutes", "1", "--kill-s", "20", "--adapters", "4"]
    ran = subprocess.run(
        [*line, "--most-growth", "30", "--home", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["kills"] == figures["restarts"] >= 1
    assert figures["complete"] > 20 and figures["left"] > 2 and figures["accepted"] > 0
