"""The only place a verb prints: for people, as one JSON document, or nearly nothing.

A verb says what it found through an `Output`; whether that becomes a table, JSON or silence is decided here.
rich is imported only when a table or a bar is drawn.

    out.say("trained 200 steps")                                   # people only
    out.table("models", ["name", "params"], [["gpt2", "124 M"]])   # people only
    out.fields("gpt2", [("parameters", "124,439,808")])            # people only
    with out.progress("train", total=200, unit="step") as bar:     # stderr; a bar, or a line now and then
        bar.update(1, loss=3.41, speed="11.6 k tok/s")
    out.result({"loss": 3.41}, quiet="2026-11-15-quiet-otter")     # --json prints the object, --quiet the text
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from armillary.cli.progress import Bar, LineBar, RichBar
from armillary.spec.toml.fields import to_plain
from armillary.store import nan_safe_json

Mode = Literal["human", "json", "quiet", "silent"]
"""silent: one of many ranks, of which another speaks"""
PIPED_WIDTH = 100
_NUMBER = re.compile(r"[-−+±~<>$]?\d[\d.,_]*(/\d[\d,]*)?( ?[A-Za-z%µ/]+)?( [\w/]+)?")


class Output:
    """What a verb prints through; one for each run of a verb."""

    def __init__(self, mode: Mode = "human") -> None:
        self.mode = mode
        self._bar: Bar | None = None
        self._answered = False

    # --- for people

    def say(self, text: str = "") -> None:
        """A line of plain text."""
        if self.mode == "human":
            self._line(text)

    def stream(self, text: str) -> None:
        """A piece of text as it arrives, without a line end."""
        if self.mode == "human":
            sys.stdout.write(text)
            sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Rows under headings; columns that hold only numbers are right-aligned. None is shown as –."""
        if self.mode == "human":
            self._draw(_rich_table(title, columns, [[cell_text(cell) for cell in row] for row in rows]))

    def fields(self, title: str, rows: Iterable[tuple[str, object]]) -> None:
        """Names and values, one per line."""
        if self.mode == "human":
            self._draw(_rich_fields(title, [(name, cell_text(value)) for name, value in rows]))

    def warn(self, text: str) -> None:
        """A line on stderr, in every mode: stdout stays clean for the answer."""
        if self.mode != "silent":
            self._line(f"warning: {text}", to_stderr=True)

    @contextmanager
    def progress(self, what: str, total: float | None = None, unit: str = "") -> Iterator[Bar]:
        """A bar on stderr for anything over two seconds; `unit="B"` counts bytes."""
        kind = RichBar if sys.stderr.isatty() else LineBar
        self._bar = kind(what, total, unit) if self.mode == "human" else Bar()
        try:
            with self._bar as bar:
                yield bar
        finally:
            self._bar = None

    # --- for programs

    def result(self, answer: object, *, quiet: str | Iterable[str] = ()) -> None:
        """The verb's answer, given once, at the end: `answer` for --json, the line(s) of `quiet` for --quiet."""
        assert not self._answered, "a verb answers once"
        self._answered = True
        if self.mode == "json":
            print(json_text(answer))
        elif self.mode == "quiet":
            for line in [quiet] if isinstance(quiet, str) else quiet:
                print(line)

    # --- inside

    def _line(self, text: str, *, to_stderr: bool = False) -> None:
        """Print without tearing a bar that is being drawn."""
        stream = sys.stderr if to_stderr else sys.stdout
        if isinstance(self._bar, RichBar) and stream.isatty():
            self._bar.print_above(text)
        else:
            print(text, file=stream, flush=self._bar is not None)

    def _draw(self, drawing: Any) -> None:
        from rich.console import Console

        width = None if sys.stdout.isatty() else PIPED_WIDTH
        console = Console(file=sys.stdout, width=width, highlight=False, emoji=False)
        with console.capture() as captured:
            console.print(drawing)
        self._line("\n".join(line.rstrip() for line in captured.get().splitlines()))


def cell_text(value: object) -> str:
    """A value as a table shows it: unknown is –, a long float is cut, lists are joined."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "–"
    return str(value)


def path_text(path: Path) -> str:
    """A path as a person in this folder would type it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def json_text(answer: object) -> str:
    """One JSON document, written as our files are: NaN becomes "nan"."""
    return nan_safe_json.dumps(_without_paths(to_plain(answer)), indent=2)


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        right = _is_numeric([row[index] for row in rows])
        table.add_column(Text(name, style="dim"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return _titled(title, table)


def _rich_fields(title: str, rows: Sequence[tuple[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return _titled(title, table)


def _titled(title: str, table: Any) -> Any:
    """The title has a line of its own: rich would fold a table's title into the width of its columns."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table) if title else table


def _is_numeric(cells: Sequence[str]) -> bool:
    known = [cell for cell in cells if cell != "–"]
    return bool(known) and all(_NUMBER.fullmatch(cell) for cell in known)
