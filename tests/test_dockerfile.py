"""The Dockerfile as far as it can be held without Docker: what it copies, installs, and asks for its health."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from armillary.cluster.kubernetes.manifests import HEALTH_PORT, USER_ID
from armillary.cluster.node_health import LIVE, listens, main, serve_health

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
COPIED = [
    path
    for line in LINES
    if line.startswith("COPY ") and "--from" not in line
    for path in line.removeprefix("COPY ").split()[:-1]
]
ENTRY = json.loads(next(line for line in LINES if line.startswith("ENTRYPOINT ")).split(" ", 1)[1])
SERVE = [*ENTRY, "serve", "gpt2"]


def values(instruction: str) -> list[str]:
    return [line.split(None, 1)[1].strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    assert set(COPIED) == set(kept)
    assert all((ROOT / path).exists() for path in COPIED)


def test_stages() -> None:
    stages = [re.fullmatch(r"(\S+) AS (\S+)", value) for value in values("FROM")]
    names = [stage.group(2) for stage in stages if stage]
    assert len(names) == len(stages) and names[-1] == "cuda" and "cpu" in names
    used = set(re.findall(r"--from=(\S+)", TEXT)) | {
        stage.group(1) for stage in stages if stage and "/" not in stage.group(1)
    }
    assert {name for name in used if not name.startswith("python:")} <= set(names)


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {extra for found in re.findall(r"'\.\[(.*?)\]'", TEXT) for extra in found.split(",")}
    assert asked and asked <= set(project["optional-dependencies"])


def test_the_user_is_that_of_the_pods_and_never_root_at_the_end() -> None:
    assert values("USER")[-1] == str(USER_ID) and f"--uid {USER_ID}" in TEXT


def test_the_health_check_asks_what_a_node_answers() -> None:
    words = json.loads(values("HEALTHCHECK")[0].split("CMD ", 1)[1])
    assert words[:3] == ["python", "-m", "armillary.cluster.node_health"]
    assert f"http://127.0.0.1:{HEALTH_PORT}{LIVE}" in words
    server = serve_health(0, ranks=1)
    try:
        here = f"http://127.0.0.1:{server.server_port}"
        assert main([f"{here}{LIVE}"], SERVE) == 0 and main([f"{here}/nothing", f"{here}{LIVE}"], SERVE) == 0
        assert main([f"{here}/nothing"], SERVE) == 1
    finally:
        server.shutdown()
        server.server_close()
    assert main([f"{here}{LIVE}"], SERVE) == 1, "nobody listens any more"
    assert main([f"{here}{LIVE}"], [*ENTRY, "train", "recipe.toml"]) == 0, "nobody should"


def test_which_containers_must_answer() -> None:
    node = "python3 -m armillary.cluster.node --nodes 2 --health-port 8080 -- train r.toml"
    assert listens(SERVE) and listens(node.split()) and listens(["sh", "-c", f"ulimit -l unlimited && exec {node}"])
    assert not listens([*ENTRY, "train", "serve"]) and not listens([*ENTRY, "bench", "serve"])


@pytest.mark.slow
def test_the_copied_files_make_a_wheel(tmp_path: Path) -> None:
    for path in COPIED:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, tmp_path / path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "out"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = (tmp_path / "out").glob("armillary-*.whl")
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True
    )
    assert "armillary/cluster/templates/slurm.sh" in listed.stdout
