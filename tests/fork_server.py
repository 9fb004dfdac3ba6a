"""A process that has imported everything and forks `armillary train`, whose ranks are forks as well: a start takes a
second instead of ten. Apart from the imports all is as in a real run: own processes, gloo, signals.

    with ForkServer(environment) as server:
        training = server.start(["train", "recipe.toml"], Path("log"))
        code = training.wait()
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One start of the command line; what it prints is in `log`.out and `log`.err."""

    pid: int
    log: Path
    process: subprocess.Popen[bytes] | None = None  # one that was not forked
    server: ForkServer | None = None

    def wait(self, timeout_s: float = 600.0) -> int:
        """The exit code; one that takes longer is killed."""
        if self.process is not None:
            try:
                return self.process.wait(timeout_s)
            finally:
                self.process.kill()
        assert self.server is not None
        return self.server.wait(self.pid, timeout_s)

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text()


class ForkServer:
    """Starts command lines one after the other."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment, self._running = environment or {}, set[int]()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(self._environment),
        )
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self._running:  # not waited for, so no other process has the number; its ranks end with it
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has died"
        return dict(json.loads(answer))

    def start(self, args: Sequence[str], log: Path) -> Training:
        pid = int(self.ask({"args": list(args), "log": str(log)})["pid"])
        self._running.add(pid)
        return Training(pid=pid, log=log, server=self)

    def wait(self, pid: int, timeout_s: float) -> int:
        code = int(self.ask({"wait": pid, "timeout_s": timeout_s})["code"])
        self._running.discard(pid)
        return code


def start_process(args: Sequence[str], log: Path) -> Training:
    """The same with imports: a process of its own, whose ranks are, too."""
    with open(log.with_suffix(".out"), "wb") as out, open(log.with_suffix(".err"), "wb") as err:
        line = [sys.executable, "-m", "armillary", *args]
        process = subprocess.Popen(line, stdout=out, stderr=err, env=environment({}))
    return Training(pid=process.pid, log=log, process=process)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), more.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more, "PYTHONPATH": paths}


# --- in the server


def serve() -> None:
    import torch.distributed.checkpoint  # noqa: F401
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    import armillary.cli.train.rank
    import armillary.cli.train.train
    import armillary.training.loop
    import armillary.training.prepare_run  # noqa: F401

    subprocess_handler.SubprocessHandler._popen = lambda self, args, env: ForkedRank(args, env)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = {"code": _wait(question["wait"], question["timeout_s"])}
        else:
            answer = {"pid": os.fork() or _run(question["args"], Path(question["log"]))}
        print(json.dumps(answer), flush=True)


def _wait(pid: int, timeout_s: float) -> int:
    forked, end = Forked(pid), time.monotonic() + timeout_s
    while (code := forked.poll()) is None:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return code


def _run(args: Sequence[str], log: Path) -> NoReturn:
    """In the fork: the command line."""
    from armillary.cli.main import main

    with suppress(OSError):
        os.setpgid(0, 0)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, stream)
        os.close(file)
    _leave(lambda: main(args))


def _leave(work: Any) -> NoReturn:
    """End the fork with the exit code of its work, whatever happens: it must not return to what it was forked from."""
    code: Any = 1
    try:
        code = work()
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


class Forked:
    """As subprocess.Popen, of a child that is a fork."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(0.005)
        return code


class ForkedRank(Forked):
    """A rank as `python -m armillary.cli.train.rank TASK`, in a process group of its own."""

    returncode: int | None

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        pid = os.fork()
        with suppress(OSError):  # both do this: whoever comes first
            os.setpgid(pid, pid)
        if not pid:
            _leave(lambda: _rank(args, env))
        super().__init__(pid)


def _rank(args: Sequence[str], env: Mapping[str, str]) -> None:
    import torch

    from armillary.cli.train.rank import run_as_rank, train_run

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.argv = list(args[2:])
    run_as_rank(train_run)


if __name__ == "__main__":
    serve()
