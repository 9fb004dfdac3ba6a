"""docs/tour.md: every command is one there is, and those that need no run are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from armillary.cli.demo.state import RECIPE
from armillary.cli.main import command
from tests.conftest import Ran

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "tour.md").read_text()
LINES = re.findall(r"^(?:armillary) (.*)$", TEXT, re.MULTILINE)
ALONE = [line for line in LINES if line.split()[0] in ("plan", "hardware", "models", "runs") and "$" not in line]


@pytest.mark.parametrize("line", LINES)
def test_it_can_be_typed(line: str) -> None:
    """Verbs, sub-verbs and options exist."""
    words = shlex.split(line.replace("$", ""))
    found: Any = command()
    name, above = "armillary", None
    while True:
        context = found.make_context(name, words, parent=above)
        if not isinstance(found, click.Group):
            return
        name, found, words = found.resolve_command(context, [*context._protected_args, *context.args])
        above = context


@pytest.mark.parametrize("line", ALONE)
def test_what_needs_no_run_works(
    line: str, cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(RECIPE.read_text())
    ran = cli(*shlex.split(line))
    assert ran.code == 0 and ran.out.strip(), ran.err


def test_links_and_files_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    assert f"cp {RECIPE.relative_to(ROOT)} mine.toml" in TEXT
