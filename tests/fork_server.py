"""A process that has imported everything and forks `armillary …`, whose ranks and engines are forks as well: a start
takes a second instead of ten. Apart from the imports all is as in a real run: own processes, gloo, signals.

    with ForkServer() as server:
        command = server.start(["train", "recipe.toml"], Path("log"))
        code = command.wait()
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from tests.forking_popen import ForkingPopen

ROOT = Path(__file__).parents[1]
ARMILLARY = ("-m", "armillary")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One start of the command line; what it prints is in `log`.out and `log`.err."""

    pid: int
    log: Path
    process: subprocess.Popen[bytes] | None = None  # one that was not forked
    server: ForkServer | None = None

    def poll(self) -> int | None:
        """The exit code, or none while it runs."""
        if self.process is not None:
            return self.process.poll()
        assert self.server is not None
        return self.server.poll(self.pid)

    def wait(self, timeout_s: float = 600.0) -> int:
        """The exit code; one that takes longer is killed."""
        end = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                self.kill()
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text()


class ForkServer:
    """Starts command lines, also several at once."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment, self._ended = environment or {}, dict[int, int]()
        self._running = set[int]()

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

    def ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has died"
        return json.loads(answer)

    def start(
        self,
        args: Sequence[str],
        log: Path,
        *,
        program: Sequence[str] = ARMILLARY,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        file_bytes: int | None = None,
        err_to_out: bool = False,
    ) -> Command:
        """`python PROGRAM ARGS`, with `env` beside the environment, and files of at most `file_bytes`."""
        question = {"args": [*program, *args], "log": str(log), "cwd": cwd and str(cwd), "file_bytes": file_bytes}
        question["err_to_out"] = err_to_out
        pid = int(self.ask(question | {"env": environment(self._environment | dict(env or {}))}))
        self._running.add(pid)
        return Command(pid=pid, log=log, server=self)

    def poll(self, pid: int) -> int | None:
        if pid in self._running and (code := self.ask({"poll": pid})) is not None:
            self._ended[pid] = int(code)
            self._running.discard(pid)
        return self._ended.get(pid)


@cache
def shared() -> ForkServer:
    """The one of this process; it ends with it."""
    server = ForkServer().__enter__()
    atexit.register(server.__exit__)
    return server


def start_process(args: Sequence[str], log: Path) -> Command:
    """The same with imports: a process of its own, whose ranks are, too."""
    with open(log.with_suffix(".out"), "wb") as out, open(log.with_suffix(".err"), "wb") as err:
        line = [sys.executable, "-m", "armillary", *args]
        process = subprocess.Popen(line, stdout=out, stderr=err, env=environment({}))
    return Command(pid=process.pid, log=log, process=process)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), more.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more, "PYTHONPATH": paths}


# --- in the server


def serve() -> None:
    subprocess.Popen = ForkingPopen  # type: ignore[misc]  # before torch's modules take it by name
    _import_all()
    gc.collect()
    gc.freeze()
    children: dict[int, subprocess.Popen[Any]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            answer = children[question["poll"]].poll()
        else:
            child = _start(**question)
            children[child.pid] = child
            answer = child.pid
        print(json.dumps(answer), flush=True)


def _import_all() -> None:
    import torch.distributed.checkpoint  # noqa: F401

    import armillary.cli.main
    import armillary.cli.serve
    import armillary.cli.train.rank
    import armillary.cli.train.train
    import armillary.engine.llm
    import armillary.serving.processes.engine_main
    import armillary.training.loop
    import armillary.training.prepare_run  # noqa: F401


def _start(
    args: Sequence[str], log: str, env: Mapping[str, str], cwd: str | None, file_bytes: int | None, err_to_out: bool
) -> Any:
    def limit() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes or 0, file_bytes or 0))

    with open(Path(log).with_suffix(".out"), "wb") as out, open(Path(log).with_suffix(".err"), "wb") as err:
        return ForkingPopen(
            [sys.executable, *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if err_to_out else err,
            env=env,
            cwd=cwd,
            process_group=0,
            preexec_fn=limit if file_bytes else None,
        )


if __name__ == "__main__":
    serve()
