"""The state that the stages of the demo share: output, store, recipe, and the report so far."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.cli.output import Output
from armillary.diagnosis.report.demo_report import DemoReport, Stage
from armillary.machine.machine import here
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.home import Home

RECIPE = Path(__file__).parent / "demo.toml"
STAGES = ("measure", "plan", "train", "serve", "load", "diagnose", "lever", "service", "report")


class DemoState:
    """A demo in progress."""

    def __init__(self, out: Output, home: Home, overrides: Sequence[str]) -> None:
        self.out, self.home, self.overrides = out, home, fitting(overrides, here().num_devices)
        self.recipe: Recipe = load_recipe(RECIPE, self.overrides)
        self.report = DemoReport(
            title=self.recipe.model.source, created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        )

    def resize(self, overrides: Sequence[str]) -> None:
        """Take these overrides in place of those so far."""
        self.overrides = tuple(overrides)
        self.recipe = load_recipe(RECIPE, self.overrides)

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[Callable[[str], None]]:
        """Announce a stage and time it; the yielded function adds to its line in the report, which also has stages that
        were interrupted."""
        self.out.say(f"\n[{STAGES.index(name) + 1}/{len(STAGES)}] {name} · {about}")
        begin, said = time.monotonic(), list[str]()
        try:
            yield said.append
        finally:
            stage = Stage(name=name, seconds=time.monotonic() - begin, said="; ".join(said))
            self.update(stages=(*self.report.stages, stage))

    def note(self, text: str) -> None:
        """Warn, and note it in the report."""
        self.out.warn(text)
        self.update(notes=(*self.report.notes, text))

    def update(self, **results: Any) -> None:
        """Add results to the report."""
        self.report = replace(self.report, **results)


def fitting(overrides: Sequence[str], devices: int) -> tuple[str, ...]:
    """The overrides, and one rank where there is one device and no layout was given."""
    said = any(text.startswith("layout.") for text in overrides)
    return tuple(overrides) if said or devices > 1 else (*overrides, "layout.dp=1")
