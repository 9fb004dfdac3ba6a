"""Every command in README and docs can be typed: its verb, sub-verbs, options and their values exist. That they run is
shown by test_commands_run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from armillary.cli.main import command
from armillary.errors import NotFound
from tests.docs.commands import ROOT, commands, pages_with_commands, words_of


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


@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_can_be_typed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = {}
    for line in dict.fromkeys(commands(page)):
        try:
            parse(words_of(line))
        except (click.exceptions.Exit, NotFound):  # a file that the reader has
            pass
        except click.ClickException as error:
            wrong[line] = error.format_message()
    assert wrong == {}
