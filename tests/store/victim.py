"""A child process to kill: it runs some code that says "ready" once it is under way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import armillary


def kill_at_random(code: str, *arguments: object, within_s: float = 0.03) -> int:
    """Start the code, wait until it is ready and a random moment more, SIGKILL it; gives its pid."""
    with start(code, *arguments) as child:
        time.sleep(random.random() * within_s)
        child.kill()
    return child.pid


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """The code in a process of its own, ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def _environment() -> dict[str, str]:
    here = str(Path(armillary.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
