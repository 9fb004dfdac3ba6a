"""Redis and nginx of a service's own, started by `armillary up` where the recipe wants them and it has none.

They are children of the service and end with it, however it ends; what Redis knows (limits, spent budgets) is in the
service's folder and there again after the next start.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from armillary.errors import ArmillaryError, MissingPart

_START_S, _STOP_S = 15.0, 10.0
_PR_SET_PDEATHSIG = 1
_NGINX = """daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; worker_processes auto;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  include {folder}/gateway.conf;
}}
"""


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The address of a Redis on a free port of loopback, with its data in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    place = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder))
    with _running("redis-server", [*place, "--appendonly", "yes", "--save", ""], folder, port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def nginx_server(folder: Path, port: int, config: str) -> Iterator[None]:
    """An nginx on `port` with this configuration of its `http` block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gateway.conf").write_text(config, encoding="utf-8")
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder), encoding="utf-8")
    with _running("nginx", ["-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log")], folder, port):
        yield


@contextmanager
def _running(program: str, arguments: Sequence[str], folder: Path, port: int) -> Iterator[None]:
    """A child that listens on a port, until the block ends."""
    path, log = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin"), folder / f"{program}.log"
    if path is None:
        raise MissingPart(f"{program} is not installed; install it, or leave its key out of [fleet]")
    with socket.socket() as taken:
        if taken.connect_ex(("127.0.0.1", port)) == 0:
            raise ArmillaryError(f"port {port} is in use already; end what has it, or give {program} another one")
    with log.open("ab") as out:
        child = subprocess.Popen(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends the service, whose last requests still need it
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_listening(program, child, port, log)
        yield
    finally:
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_listening(program: str, child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if child.poll() is not None or time.monotonic() > end:
            raise ArmillaryError(f"{program} does not listen on port {port}; its log {log} says why")
        time.sleep(0.05)
