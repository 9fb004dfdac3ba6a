"""A server process in an actor of Ray Serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

_POLL_S, _PROBE_S = 0.25, 2.0
_LEASE_S = 10.0
"""time that a server goes on where Ray has killed its actor, which has no time to end it"""
KEEPER = ("-m", "armillary.fleet.pool.keeper")
"""runs a server and ends it where its lease is no longer renewed"""


class ServedProcess:
    """A server process in an actor of Ray Serve; the actor is healthy while the server is."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: str, start_s: float, drain_s: float
    ) -> None:
        import ray

        self._drain_s, self._ended = drain_s, False
        host = ray.util.get_node_ip_address()
        self._address = f"http://{host}:{_free_port(host)}"
        port = self._address.rpartition(":")[2]
        self._lease = Path(f"{log}.lease")
        self._lease.touch()
        threading.Thread(target=self._renew, daemon=True).start()
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                [command[0], *KEEPER, str(self._lease), str(_LEASE_S), *command, "--host", host, "--port", port],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        end = time.monotonic() + start_s
        while not _answers(f"{self._address}/ready"):
            if self._process.poll() is not None or time.monotonic() > end:
                self.__del__()
                raise RuntimeError(f"the server was not ready; it ended with {self._process.poll()}, its log is {log}")
            time.sleep(_POLL_S)

    def _renew(self) -> None:
        while not self._ended:
            self._lease.touch()
            time.sleep(_LEASE_S / 10)

    def address(self) -> str:
        return self._address

    def check_health(self) -> None:
        """Serve restarts the actor where this fails three times."""
        if self._process.poll() is not None or not _answers(f"{self._address}/health"):
            raise RuntimeError("its server does not answer")

    def kill(self) -> None:
        """End the server now."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def __del__(self) -> None:
        """Serve's shutdown of a replica: let requests finish, then end the process."""
        process = getattr(self, "_process", None)
        if process is None or self._ended:
            return
        self._ended = True
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._drain_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=_PROBE_S) as response:
            return bool(response.status == 200)
    except (URLError, OSError, ValueError):
        return False


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
