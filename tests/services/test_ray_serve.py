"""A pool of replicas on Ray Serve, on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.pool.test_local_pool import SERVER
from tests.services.ray_cluster import RAY, RayCluster, running_ray

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not (RAY / "ray").exists(), reason="Ray is missing; make test-services installs it"),
]
LIFE = Path(__file__).parent / "serve_pool_life.py"


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    folder = Path("/tmp") / f"serve-{os.getpid()}"  # Ray's sockets need short names
    folder.mkdir()
    with running_ray(folder) as cluster:
        yield cluster


def test_replicas_start_are_adopted_replaced_and_drained(cluster: RayCluster, tmp_path: Path) -> None:
    command = [str(RAY / "python"), str(LIFE), cluster.address, str(tmp_path / "pool"), str(SERVER)]
    done = subprocess.run(command, env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    saw = json.loads(done.stdout.splitlines()[-1])
    print(saw)
    assert saw["releases"] == ["", "registry:bot:2"] and saw["answers"] == [200, 200]
    assert saw["adopted"] and saw["left"] == 0
