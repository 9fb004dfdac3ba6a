"""Every command in README and docs can be typed: its verb, sub-verbs, options and their values exist. Those that only
look something up or plan are run, once each; the rest needs a run, a server or a cluster, and has tests of its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from armillary.cli.main import command
from tests.conftest import Ran

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*.md"))]
FENCE = re.compile(r"^```(?:bash|sh|console|text)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^(?:\$ )?armillary (.+)$")
PLACEHOLDERS = {"[STEP]": "100", "A": "100", "B": "200"}
"""what stands for numbers"""
ALONE = ("plan", "hardware", "models", "doctor")
ELSEWHERE = ("…", "RUN", "PLAN", "RECIPE", "MODEL", "--from", "mine.toml", "--on here", "quiet-otter", "doctor --")
"""parts of commands that stand for something of the reader's"""


def commands(page: Path) -> Iterator[str]:
    """Lines of code blocks that begin with armillary, joined where they continue, without comments."""
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if match := LINE.match(line.strip()):
                yield match[1]


def words_of(line: str) -> list[str]:
    """The words up to a comment, pipe or redirection."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    ends = [i for i, word in enumerate(words) if word in ("|", ">", "&", "&&", "||", "…", "...")]
    return words[: ends[0]] if ends else words


def parse(words: list[str]) -> None:
    """click.UsageError where the command line does not exist."""
    found: Any = command()
    name, above = "armillary", None
    while True:
        context = found.make_context(name, list(words), parent=above)
        if not isinstance(found, click.Group):
            return
        name, found, words = found.resolve_command(context, [*context._protected_args, *context.args])
        above = context


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=lambda page: page.name)
def test_every_command_can_be_typed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = {}
    for line in dict.fromkeys(commands(page)):
        try:
            parse(words_of(line))
        except click.exceptions.Exit:
            pass
        except click.ClickException as error:
            wrong[line] = error.format_message()
    assert wrong == {}


def alone() -> list[str]:
    lines = [line for page in PAGES for line in commands(page)]
    joined = dict.fromkeys(shlex.join(words_of(line)) for line in lines if line.split()[0] in ALONE)
    return [line for line in joined if not any(part in line for part in ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.parametrize("line", alone())
def test_what_needs_nothing_else_runs(
    line: str, cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ran = cli(*shlex.split(line))
    assert ran.code == 0 and ran.out.strip(), ran.err
