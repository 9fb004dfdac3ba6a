"""Forks that stand for processes: what others see of them is what they would see of a new interpreter."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.fork_server import Command, ForkServer
from tests.forking_popen import forkable

PARENT = """
import subprocess, sys
child = [sys.executable, "-c", "import os, sys; print(input(), os.environ['WORD']); sys.exit('no more')"]
done = subprocess.run(child, input="hello", capture_output=True, text=True, env={"WORD": "there"})
print(done.stdout.strip(), done.stderr.strip(), done.returncode, subprocess.Popen.__name__)
"""


@pytest.mark.parametrize(
    ("code", "ends_with", "out", "err"),
    [
        ("print('said'); import sys; sys.exit(3)", 3, "said\n", ""),
        ("import sys; sys.exit('sorry')", 1, "", "sorry\n"),
        ("1 / 0", 1, "", "ZeroDivisionError"),
        ("import os; print(os.getcwd(), os.environ['PLACE'])", 0, "{folder} x\n", ""),
        ("import atexit; atexit.register(print, 'end')", 0, "end", ""),
        ("import threading; threading.Timer(0.2, print, ['later']).start()", 0, "later", ""),
        (PARENT, 0, "hello there no more 1 ForkingPopen", ""),
    ],
)
def test_a_fork_is_as_a_process(
    code: str, ends_with: int, out: str, err: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    done = fork_server.start([], tmp_path / "log", program=("-c", code), cwd=tmp_path, env={"PLACE": "x"})
    assert done.wait(60) == ends_with, done.err
    assert out.format(folder=tmp_path) in done.out and err in done.err and (err or not done.err)


def test_signals_end_it(tmp_path: Path, fork_server: ForkServer) -> None:
    def asleep(name: str) -> Command:
        return fork_server.start([], tmp_path / name, program=("-c", "import time; time.sleep(600)"))

    first, second = asleep("one"), asleep("two")
    assert first.poll() is None and second.poll() is None
    first.terminate()
    assert first.wait(60) == -signal.SIGTERM and second.poll() is None
    second.kill()
    assert second.wait(60) == -signal.SIGKILL


def test_files_end_at_a_limit(tmp_path: Path, fork_server: ForkServer) -> None:
    code = "with open('x', 'wb') as file: file.write(bytes(2000))"
    done = fork_server.start([], tmp_path / "log", program=("-c", code), cwd=tmp_path, file_bytes=1000)
    assert done.wait(60) == 1 and "File too large" in done.err


def test_other_programs_are_started_as_ever() -> None:
    assert forkable([sys.executable, "-u", "-m", "armillary", "models"])
    others = ["sleep", "1"], "sleep 1", [sys.executable, "file.py"], [sys.executable, "-m", "pip"]
    assert not any(map(forkable, others))
