"""`armillary registry` from a push to a rollback, as a user types it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import write_model

Cli = Callable[..., Any]


@pytest.fixture
def run(cli: Cli) -> Any:
    """Runs a verb of the registry; its JSON, or its error where it fails."""

    def call(*words: str, code: int = 0) -> Any:
        ran = cli("registry", *words, "--json")
        assert ran.code == code, ran.out + ran.err
        return ran.json if not code else ran.err + ran.out

    return call


def test_from_push_to_rollback(run: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "results.json").write_text('{"mmlu": {"acc": 0.5, "name": "x"}}')
    first = run("push", str(folder), "bot", "--alias", "champion", "--eval", str(tmp_path / "results.json"))
    assert (first["release"], first["evals"], first["weights"]["bytes"]) == ("bot:1", {"mmlu.acc": 0.5}, 7)
    (folder / "model.safetensors").write_bytes(b"better")
    assert run("push", str(folder), "bot", "--eval", "mmlu=0.6", "--licence", "mit")["licence"] == "mit"
    assert run("promote", "bot:2", "champion", "--expect", "1")["version"] == 2
    assert "alias champion is at version 2, not at version 1" in run(
        "promote", "bot:1", "champion", "--expect", "1", code=2
    )
    assert [(row["release"], row["aliases"]) for row in run("ls")] == [("bot:2", "champion"), ("bot:1", "")]
    shown = run("show", "bot@champion")
    assert shown["aliases"] == {"champion": 2} and [move["version"] for move in shown["history"]] == [1, 2]
    assert run("rollback", "bot", "champion")["version"] == 1
    copy = run("pull", "bot@champion", "--to", str(tmp_path / "copy"))
    assert Path(copy["folder"], "model.safetensors").read_bytes() == b"weights"
    assert run("verify", "bot:2")["release"] == "bot:2"
    assert run("gc", "--keep", "1", "--dry-run")["versions"] == []
    assert "is no result; write it like --eval mmlu=0.61" in run("push", str(folder), "bot", "--eval", "mmlu", code=2)


def test_a_registry_elsewhere(run: Any, tmp_path: Path) -> None:
    where = ("--registry", f"memory://{tmp_path.name}")
    run("push", str(write_model(tmp_path / "model")), "bot", *where)
    assert run("ls", *where)[0]["release"] == "bot:1" and run("ls") == []
    assert "no release 'bt'; did you mean bot?" in run("show", "bt", *where, code=2)
