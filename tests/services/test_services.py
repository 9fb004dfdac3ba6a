"""The services that `make test-services` installs are there and answer; where one is missing, the test fails."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.services
RAY = Path(__file__).parents[2] / ".venv-ray" / "bin" / "python"


@pytest.mark.parametrize("line", ["redis-server --version", "nginx -v", "slurmctld -V", "chromium --version"])
def test_a_program_is_installed(line: str) -> None:
    subprocess.run(line.split(), check=True, timeout=60)


def test_redis_answers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)])
    try:
        assert _ping(port) == b"+PONG\r\n"
    finally:
        process.terminate()
        process.wait(30)


def _ping(port: int) -> bytes:
    end = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "redis does not listen"
            time.sleep(0.05)


def test_ray_runs_a_task() -> None:
    code = (
        "import ray; ray.init(num_cpus=1, include_dashboard=False); print(ray.get(ray.remote(lambda: 6 * 7).remote()))"
    )
    ran = subprocess.run([str(RAY), "-c", code], capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0 and ran.stdout.split()[-1] == "42", ran.stderr[-2000:]
