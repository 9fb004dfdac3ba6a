"""Child processes that a script starts are counted, torch's own helpers not."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator

import pytest

from armillary.profiling.record.child_processes import ChildProcesses


@pytest.fixture
def children() -> Iterator[ChildProcesses]:
    made, plain = ChildProcesses(), subprocess.Popen.__init__
    made.watch()
    yield made
    made.release()
    assert subprocess.Popen.__init__ is plain


def work() -> None:
    pass


def test_processes(children: ChildProcesses) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    assert (process.exitcode, children.count) == (0, 1)


def test_programs(children: ChildProcesses) -> None:
    assert subprocess.run([sys.executable, "-S", "-c", "print(3)"], capture_output=True, check=True).stdout == b"3\n"
    subprocess.run(["true"], check=True)
    subprocess.run("true", shell=True, check=True)
    assert children.count == 1


@pytest.mark.parametrize(
    ("file", "counted"),
    [("torch/_inductor/cpp.py", 0), ("torch/utils/data/dataloader.py", 0), ("mine/torch/train.py", 1)],
)
def test_helpers_of_torch_do_not_count(children: ChildProcesses, file: str, counted: int) -> None:
    code = compile("subprocess.run([sys.executable, '-S', '-c', ''], check=True)", f"/packages/{file}", "exec")
    exec(code, {"subprocess": subprocess, "sys": sys})
    assert children.count == counted
