"""`armillary serve`: what is wrong is one line before anything is loaded; how it serves is in tests/serving."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.store.home import Home
from armillary.store.runs import list_runs
from tests.conftest import Ran
from tests.fork_server import ForkServer
from tests.serving.tiny import make_folder

Cli = Callable[..., Ran]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-model"], "no model 'no-such-model'"),
        (["."], "no config.json"),
        (["gpt2", "--port", "99999"], "99999"),
        (["gpt2", "--set", "serve.tools=smoke"], "serve.tools=smoke is not known"),
        (["gpt2", "--set", "serve.dtype=fp7"], "serve.dtype=fp7 is not known"),
        (["gpt2", "--name", "x"], "--name is no more; try --set serve.name="),
        (["gpt2", "--api-key-file", "x"], "--api-key-file is no more; try --set serve.api_key_file="),
        (["gpt2", "--set", "train.steps=3"], "is not of [serve]"),
        (["gpt2", "--set", "serve.max_runing=3"], "max_running"),
        (["gpt2", "--set", "serve.timeout_s=0"], "timeout_s"),
        (["gpt2", "--recipe", "none.toml"], "no recipe 'none.toml'"),
        (["gpt2", "--set", "serve.speculate=draft"], "needs a model that drafts"),
        (["gpt2", "--set", "serve.speculate=ngram", "--set", "serve.draft=small"], "leave one out"),
    ],
)
def test_what_is_wrong_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("serve", *words)
    assert ran.code == 2 and ran.err.count("\n") == 1 and said in ran.err and "; " in ran.err, ran.err


def test_a_port_in_use_is_said_before_a_run_begins(cli: Cli, folder: Path, home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = cli("serve", str(folder), "--port", str(taken.getsockname()[1]))
    assert ran.code == 2 and "cannot listen on" in ran.err and list_runs(home) == []


def test_keys_are_read_from_a_file(cli: Cli, folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "one API key per line" in cli("serve", str(folder), "--set", f"serve.api_key_file={keys}").err
    keys.write_text("\n")
    assert "holds no API key" in cli("serve", str(folder), "--set", f"serve.api_key_file={keys}").err


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(
    folder: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """The engine's process says it, the server passes it on."""
    line = ["serve", str(folder), "--port", "0", "--device", "cpu", "--set", "serve.max_model_len=100000"]
    ran = fork_server.start([*line, "--home", str(tmp_path / "home")], tmp_path / "log")
    assert ran.wait(120) == 2 and "error: serve.max_model_len=100000 exceeds the context of tiny" in ran.err, ran.err
    assert "Traceback" not in ran.err
