"""Training and data preparation on a Ray cluster of two nodes on this machine, one of which is lost."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services.ray_cluster import RAY, RayCluster, running_ray
from tests.services.small_training import RECIPE, SLOW_STEPS, same_weights, write_text

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(not (RAY / "ray").exists(), reason="Ray is missing; make test-services installs it"),
]
ROOT = Path(__file__).parents[2]
LONG_S = 1800.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = Path("/tmp") / f"ray-{os.getpid()}"  # Ray's sockets need short names
    folder.mkdir()
    with running_ray(folder) as cluster:
        yield cluster


@pytest.fixture
def armillary(cluster: RayCluster, tmp_path: Path) -> Callable[..., str]:
    write_text(tmp_path / "text")

    def run(*words: str) -> str:
        command = [str(RAY / "python"), "-m", "armillary", *words]
        env = {**cluster.env, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_data_prepared_on_ray_is_the_same(armillary: Callable[..., str], cluster: RayCluster, tmp_path: Path) -> None:
    settings = ("--tokenizer", "512", "--held-out", "0.1")
    armillary("data", "prepare", "text", "--out", "here", *settings)
    armillary("data", "prepare", "text", "--out", "there", *settings, "--on", f"ray={cluster.address}")
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


def named_actors(cluster: RayCluster, folder: Path) -> list[dict[str, str]]:
    look = "import json, ray, sys; ray.init(sys.argv[1], logging_level='error', log_to_driver=False);"
    look += "print(json.dumps(ray.util.list_named_actors(all_namespaces=True)))"
    end = time.monotonic() + 60
    while True:
        command = [str(RAY / "python"), "-c", look, cluster.address]
        done = subprocess.run(command, env=cluster.env, cwd=folder, capture_output=True, text=True, timeout=LONG_S)
        names = list(json.loads(done.stdout.splitlines()[-1]))
        if not names or time.monotonic() > end:
            return names
        time.sleep(1)


def test_training_survives_the_loss_of_a_node(
    armillary: Callable[..., str], cluster: RayCluster, tmp_path: Path
) -> None:
    recipe = RECIPE.format(text=tmp_path / "text", steps=60, more="").replace("save_every = 0", "save_every = 5")
    launch = f'[launch]\naddress = "{cluster.address}"\ncpus_per_node = 1\n'
    slow = f'[launch.environment]\nPYTHONPATH = "{SLOW_STEPS}{os.pathsep}{ROOT}"\n'
    (tmp_path / "r.toml").write_text(recipe + launch + slow)
    armillary("launch", "r.toml", "--on", "ray", "--nodes", "2", "--run", "fox")
    note = tmp_path / "jobs" / "fox" / "ray_state.json"

    def facts() -> dict[str, str]:
        (found,) = json.loads(armillary("launch", "jobs", "--json"))
        return dict(found)

    def wait_for(done: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG_S
        while not done():
            assert time.monotonic() < end, armillary("launch", "logs", "fox")
            time.sleep(1)

    wait_for(lambda: any(tmp_path.glob("runs/*-fox/checkpoints/*[05]")))
    assert len({each["node"] for each in json.loads(note.read_text())["actors"]}) == 2, "one rank on each node"
    cluster.lose_node(1)
    wait_for(lambda: facts()["state"] not in ("running", "pending"))
    log = armillary("launch", "logs", "fox")
    assert facts()["state"] == "finished", log + note.read_text()
    assert named_actors(cluster, tmp_path) == [], "the supervisor ends with its job"
    assert " from step " in log and "finished after 60 steps" in log
    (tmp_path / "plain.toml").write_text(recipe)
    armillary("train", "plain.toml", "--devices", "2", "--run", "hen")
    assert same_weights(tmp_path, "fox", "hen")
