"""Shell completion: the scripts, and the words behind TAB."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from armillary.cli import completion
from armillary.cli.main import command
from armillary.store.home import Home
from armillary.store.runs import create_run

Cli = Callable[..., Any]


def words(*typed: str) -> list[str]:
    """What the shell would offer after `armillary` and these words, the last one unfinished."""
    *done, unfinished = typed
    found = ShellComplete(command(), {}, "armillary", "_ARMILLARY_COMPLETE").get_completions(list(done), unfinished)
    return [item.value for item in found]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_says_how_to_install_it(cli: Cli, shell: str) -> None:
    ran = cli("completion", shell)
    assert ran.code == 0 and f"armillary completion {shell}" in ran.out.splitlines()[0]
    assert "_ARMILLARY_COMPLETE" in ran.out
    assert cli("completion", shell, "--json").json["shell"] == shell


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_accepts_the_script(cli: Cli) -> None:
    script = cli("completion", "bash", "-q").out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_an_unknown_shell_is_one_line(cli: Cli) -> None:
    ran = cli("completion", "tcsh")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "fish" in ran.err


def test_verbs_models_and_hardware_complete() -> None:
    assert words("mod") == ["models"]
    assert "llama-3-8b" in words("models", "llama-3")
    assert "here" in words("hardware", "he") and "h200" in words("hardware", "h2")
    assert "--json" in words("models", "--j")


def test_runs_of_the_given_home_complete(home: Home) -> None:
    run = create_run(home, {})
    assert words("runs", "--home", str(home.work), run.name[:3]) == [run.name]
    assert run.name in words("models", "--home", str(home.work), run.name[:3])


def test_a_home_that_is_not_there_offers_nothing() -> None:
    ctx = click.Context(command())
    ctx.params["home_dir"] = "/nonexistent"
    assert completion.runs(ctx, click.Option(["--x"]), "") == []
