"""The model a person named on the command line, with a bar where it has to be fetched first."""

from __future__ import annotations

from contextlib import ExitStack

from armillary.cli.output import Output
from armillary.cli.progress import Bar
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource, resolve_model


def find_model(out: Output, home: Home, text: str, *, need_weights: bool) -> ModelSource:
    """`resolve_model`, showing the download if there is one."""
    with ExitStack() as stack:
        bars: list[Bar] = []

        def report(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(out.progress(f"fetching {text}", unit="B")))
            bars[0].at(done, total)

        return resolve_model(text, home, need_weights=need_weights, fetch_progress=report)
