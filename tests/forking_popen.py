"""subprocess.Popen that forks instead of starting an interpreter: programs that import torch begin with all that this
process has imported. To everybody else the child is as a new process: streams, descriptors, environment,
signals and exit code are as subprocess has them.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

FORKED = (
    "armillary",
    "armillary.cli.train.rank",
    "armillary.planning.simulation.sleeping_engine",
    "armillary.serving.processes.engine_main",
    "tests.serving.slow_engine",
)
"""programs of `python -m`; `python -c` is forked whatever it does"""
_HELD: list[Any] = []
"""what belongs to the parent and must not be collected here: a file that is collected is closed"""


class ForkingPopen(subprocess.Popen[Any]):
    """Whatever is no such line is started as ever."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        if not forkable(args):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        pipes, (session, group) = rest[3:9], rest[-2:]
        self.pid = os.fork()
        if not self.pid:
            if session:
                os.setsid()
            elif group is not None and group >= 0:
                os.setpgid(0, group)
            _run(lambda: _become(args, (pipes[0], pipes[3], pipes[5]), pass_fds, cwd, env, preexec_fn))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def forkable(args: Any) -> bool:
    line = [arg for arg in args if arg != "-u"] if isinstance(args, list | tuple) else []
    if line[:1] != [sys.executable] or len(line) < 3:
        return False
    return line[1] == "-c" or (line[1] == "-m" and line[2] in FORKED)


# --- in the child


def _run(work: Any) -> NoReturn:
    """End the fork with the exit code of its work, whatever happens: it must not return to what it was forked from."""
    code: Any = 1
    try:
        work()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads as the interpreter does
        code = 0
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _become(args: Any, streams: Sequence[int], pass_fds: Sequence[int], cwd: Any, env: Any, preexec_fn: Any) -> None:
    _forget_the_parent(streams, pass_fds)
    if cwd is not None:
        os.chdir(cwd)
    if preexec_fn is not None:
        preexec_fn()
    if env is not None:
        _use_environment(env)
    line = [arg for arg in args if arg != "-u"]
    sys.argv = [line[1] if line[1] == "-c" else line[2], *line[3:]]
    if line[1] == "-c":
        exec(compile(line[2], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(line[2], run_name="__main__", alter_sys=True)


def _forget_the_parent(streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    """Its signal handlers, its event loop, and its descriptors: those lead to /dev/null, because closed ones would be
    given to new files, and be closed when an object of the parent is collected."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    asyncio._set_running_loop(None)
    atexit._clear()
    for stream, number in zip(streams, range(3), strict=True):
        if stream != -1:
            os.dup2(stream, number)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor > 2 and descriptor not in pass_fds:
            with suppress(OSError):  # the listing's own
                os.dup2(nowhere, descriptor, inheritable=False)
    for descriptor in pass_fds:
        os.set_inheritable(descriptor, True)
    _HELD.extend([sys.stdin, sys.stdout, sys.stderr])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _use_environment(env: Any) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
