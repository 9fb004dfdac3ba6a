"""Progress of long work, on stderr: a bar in a terminal, a line now and then in a log, nothing for programs.

All have `update(n, **live)`, where `n` more units are done and `live` are fields to show beside them, and
`at(done, total)`, for work that counts by itself.
"""

import sys
import time
from typing import Any, Self

from armillary.units import bytes_text, count_text, seconds_text

FIRST_LINE_S = 2.0
LINE_EVERY_S = 10.0


class Bar:
    """What `Output.progress` gives; this one shows nothing (--json and --quiet)."""

    def update(self, n: float = 1, **live: object) -> None:
        """`n` more units are done; `live` fields replace those shown before."""

    def at(self, done: float, total: float | None = None, **live: object) -> None:
        """`done` units of `total` are done, for work that counts by itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LineBar(Bar):
    """A plain line every ten seconds, for logs and pipes; work under two seconds prints nothing."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done: float = 0
        self.live: dict[str, object] = {}
        self.began = time.monotonic()
        self.next_line = self.began + FIRST_LINE_S
        self.first: tuple[float, float] | None = None  # units done and time at the first call: the start of the rate
        self.printed: tuple[float, dict[str, object]] | None = None

    def update(self, n: float = 1, **live: object) -> None:
        self.at(self.done + n, None, **live)

    def at(self, done: float, total: float | None = None, **live: object) -> None:
        self.done, self.total = done, total or self.total
        self.live |= live
        if self.first is None or done < self.first[0]:  # a stage that counts anew
            self.first = done, time.monotonic()
        if time.monotonic() >= self.next_line:
            self._print()

    def __exit__(self, *_: object) -> None:
        if time.monotonic() - self.began >= FIRST_LINE_S and self.printed != (self.done, self.live):
            self._print()

    def _print(self) -> None:
        now = time.monotonic()
        self.next_line = now + LINE_EVERY_S
        parts = [f"{self.what} {amount_text(self.done, self.total, self.unit)}", *live_texts(self.live)]
        parts.append(f"{seconds_text(now - self.began)} elapsed{self._left_text(now)}")
        print("  ".join(parts), file=sys.stderr, flush=True)
        self.printed = self.done, dict(self.live)

    def _left_text(self, now: float) -> str:
        """', about 38 s left' at the speed so far; '' until two calls have shown a speed."""
        done, since = self.first or (0.0, now)
        if not self.total or self.done >= self.total or self.done <= done or now <= since:
            return ""
        return f", about {seconds_text((now - since) / (self.done - done) * (self.total - self.done))} left"


class RichBar(Bar):
    """A bar with the live fields and the time left, which stays on the screen when the work is done."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}"),
            TextColumn("{task.fields[live]}", style="cyan"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, highlight=False, emoji=False),
            redirect_stdout=False,
        )
        self._unit = unit
        self._task = self._progress.add_task(what, total=total, amount=amount_text(0, total, unit), live="")
        self._live: dict[str, object] = {}

    def update(self, n: float = 1, **live: object) -> None:
        self.at(self._progress.tasks[0].completed + n, None, **live)

    def at(self, done: float, total: float | None = None, **live: object) -> None:
        self._live |= live
        self._progress.update(self._task, completed=done, total=total)
        total = self._progress.tasks[0].total
        self._progress.update(
            self._task, amount=amount_text(done, total, self._unit), live="  ".join(live_texts(self._live))
        )

    def print_above(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def amount_text(done: float, total: float | None, unit: str) -> str:
    """'120/200 step', '1.2 GB of 3.1 GB', '4,096'."""
    if unit == "B":
        return f"{bytes_text(done)} of {bytes_text(total)}" if total else bytes_text(done)
    plain = count_text if max(done, total or 0) >= 1e6 else "{:,.0f}".format
    return f"{plain(done)}" + (f"/{plain(total)}" if total else "") + (f" {unit}" if unit else "")


def live_texts(live: dict[str, object]) -> list[str]:
    return [f"{name.replace('_', ' ')} {f'{v:.4g}' if isinstance(v, float) else v}" for name, v in live.items()]


def on_bar(bar: Bar) -> Any:
    """A callback(done, total, case) that moves the bar."""
    return lambda done, total, case: bar.at(done, total, now=case)
