"""The command itself: help, errors in one line, exit codes, did-you-mean."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from armillary import __version__
from armillary.cli import main as entry
from armillary.cli.main import main
from armillary.cli.verb_decorator import VerbGroup, verb
from armillary.cli.verb_table import RINGS, VERBS
from armillary.errors import NotFound

Cli = Callable[..., Any]
ROOT = Path(__file__).parent.parent.parent


def armillary(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "armillary", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60, **options)


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """`trying(function)` makes a verb `models` of a function, to see what the command makes of it."""

    def install(function: Callable[..., None]) -> None:
        monkeypatch.setattr(entry.LazyGroup, "get_command", lambda self, ctx, name: verb(function))

    return install


# --- help


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_help_lists_every_verb_under_its_ring(cli: Cli, args: tuple[str, ...]) -> None:
    ran = cli(*args)
    assert (ran.code, ran.err) == (0, "")
    for each in VERBS.values():
        assert f"  {each.name} " in ran.out and RINGS[each.ring] in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom armillary.cli.main import main\nmain(['--help'])\n"
        "print('heavy:', *[m for m in ('torch', 'numpy', 'rich') if m in sys.modules])\n"
        "print('verbs:', *[v for v in sys.modules if v.startswith('armillary.cli.') and v not in "
        "('armillary.cli.main', 'armillary.cli.verb_table')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-2:] == ["heavy:", "verbs:"]


def test_every_verb_explains_itself_without_torch() -> None:
    code = (
        "import sys\nfrom armillary.cli.main import VERBS, main\n"
        "for name in VERBS:\n"
        "    assert main([name, '--help']) == 0, name\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"armillary {name}" in done.stdout for name in VERBS)


def test_a_plan_imports_nothing_heavy() -> None:
    """Half a second is the aim: scipy alone takes 0.3, and BLAS threads, which plans do not use, 0.05."""
    code = (
        "import os, sys\nfrom armillary.cli.main import main\n"
        "assert main('plan --model llama-3-8b --on h100x8 --quiet'.split()) == 0\n"
        "assert main('plan --for serve --model llama-3-8b --on h100 --quiet'.split()) == 0\n"
        "print('heavy:', *[m for m in ('torch', 'scipy', 'pydantic', 'rich') if m in sys.modules])\n"
        "print('threads:', os.environ.get('OPENBLAS_NUM_THREADS'), len(os.listdir('/proc/self/task')))"
    )
    kept = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=kept)
    assert done.stdout.splitlines()[-2:] == ["heavy:", "threads: None 1"]


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"armillary {__version__}\n"


def test_the_module_runs_as_the_command() -> None:
    done = armillary("--version")
    assert (done.returncode, done.stdout) == (0, f"armillary {__version__}\n")


# --- errors


def one_line(ran: Any) -> str:
    assert ran.code == 2
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1 and "Traceback" not in ran.err
    return str(ran.err).removeprefix("error: ").rstrip()


def test_an_unknown_verb_gets_the_nearest(cli: Cli) -> None:
    assert one_line(cli("modles")) == "no verb 'modles'; did you mean models?"
    assert one_line(cli("zzz")) == "no verb 'zzz'; armillary --help lists them"


def test_an_unknown_option_gets_the_nearest(cli: Cli) -> None:
    assert one_line(cli("models", "--jsn")) == "armillary models has no option --jsn; did you mean --json?"
    assert one_line(cli("models", "--zzz")) == (
        "armillary models has no option --zzz; armillary models --help says what it takes"
    )


def test_a_missing_argument_names_it(cli: Cli) -> None:
    assert one_line(cli("completion")).startswith("missing argument")


def test_options_go_after_the_verb(cli: Cli) -> None:
    assert one_line(cli("--json", "models")) == "armillary has no option --json; put it after the verb"


def test_user_errors_are_also_json_when_asked(cli: Cli, trying: Cli) -> None:
    def models(out: Any, home: Any) -> None:
        raise NotFound("no such thing;\n  try another")

    trying(models)
    ran = cli("models", "--json")
    assert one_line(ran) == "no such thing; try another"
    assert ran.json == {"error": "no such thing; try another", "kind": "NotFound"}
    assert cli("models").out == ""


def test_usage_errors_are_also_json_when_asked(cli: Cli) -> None:
    assert cli("modles", "--json").json["kind"] == "Usage"


def test_json_after_a_double_dash_is_not_ours(cli: Cli) -> None:
    assert cli("modles", "--", "--json").out == ""


def test_a_path_that_cannot_be_written_is_one_line(cli: Cli, trying: Cli) -> None:
    def models(out: Any, home: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/etc/x")

    trying(models)
    assert one_line(cli("models")) == "/etc/x: Permission denied; check the path, its permissions and the disk"


def test_a_missing_package_names_its_extra(cli: Cli, trying: Cli) -> None:
    def models(out: Any, home: Any) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")

    trying(models)
    assert one_line(cli("models")) == "this verb needs pyarrow: pip install 'armillary[data]'"


def test_a_bug_keeps_its_traceback(cli: Cli, trying: Cli) -> None:
    def models(out: Any, home: Any) -> None:
        raise KeyError("oops")

    trying(models)
    ran = cli("models")
    assert ran.code == 1
    assert "Traceback" in ran.err and "KeyError: 'oops'" in ran.err
    assert ran.err.splitlines()[-1].startswith("a bug in armillary: please report")


def test_an_interrupt_is_one_line_and_130(cli: Cli, trying: Cli) -> None:
    def models(out: Any, home: Any) -> None:
        raise KeyboardInterrupt

    trying(models)
    ran = cli("models")
    assert (ran.code, ran.err.strip()) == (130, "interrupted")


def test_a_verb_may_choose_its_exit_code(cli: Cli, trying: Cli) -> None:
    def models(out: Any, home: Any) -> None:
        raise click.exceptions.Exit(130)

    trying(models)
    assert cli("models").code == 130


def test_a_reader_that_leaves_is_not_an_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m armillary hardware --json | head -1"  # far more than a pipe holds
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("[\n", "")


# --- what verbs share


def test_home_and_arguments_reach_the_verb(trying: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @click.argument("name")
    @click.option("--limit", default=3)
    def models(out: Any, home: Any, name: str, limit: int) -> None:
        """Help."""
        out.result({"home": home.work, "name": name, "limit": limit})

    trying(models)
    assert main(["models", "gpt2", "--json", "--home", str(tmp_path)]) == 0
    assert f'"home": "{tmp_path}"' in capsys.readouterr().out


def test_a_group_of_verbs_offers_the_nearest(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    group = VerbGroup("data", help="Data.")

    @group.verb
    def prepare(out: Any, home: Any) -> None:
        """Prepare."""
        out.say("prepared")

    monkeypatch.setattr(entry.LazyGroup, "get_command", lambda self, ctx, name: group)
    assert cli("data", "prepare").out == "prepared\n"
    assert one_line(cli("data", "prepar")) == "no verb 'prepar'; did you mean armillary data prepare?"
    assert "prepare" in main_help(cli("data", "--help"))


def main_help(ran: Any) -> str:
    assert ran.code == 0
    return str(ran.out)


def flags(command: click.Command, context: click.Context, name: str = "armillary") -> dict[str, list[str]]:
    """Every verb's own flags, hidden ones left out."""
    if isinstance(command, click.Group):
        inner = {name: command.get_command(context, name) for name in command.list_commands(context)}
        found = [flags(one, context, f"{name} {verb}") for verb, one in inner.items() if one is not None]
        return {verb: own for part in found for verb, own in part.items()}
    shared = ("--home", "-q", "--json", "--yes", "--model-code")
    return {
        name: [
            option.opts[0]
            for option in command.params
            if isinstance(option, click.Option) and not option.hidden and option.opts[0] not in shared
        ]
    }


def test_no_verb_has_more_than_eight_flags() -> None:
    command = entry.command()
    found = flags(command, click.Context(command))
    assert len(found) > len(VERBS) and "--port" in found["armillary serve"]
    assert {verb: own for verb, own in found.items() if len(own) > 8} == {}
