"""What the shell offers after TAB: names of models, hardware and runs.

Completion never fails aloud: a broken home or catalogue offers nothing.
"""

from __future__ import annotations

import click

from armillary.errors import ArmillaryError


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Catalogue models, then runs of this home."""
    from armillary.spec.catalogue import models as catalogue

    return [name for name in catalogue() if name.startswith(incomplete)] + runs(ctx, param, incomplete)


def hardware(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Chips, then nodes."""
    from armillary.spec.catalogue import chips, nodes

    return [name for name in ("here", *chips(), *nodes()) if name.startswith(incomplete)]


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Short names and ids of this home's runs, newest first."""
    from armillary.store.home import Home
    from armillary.store.runs import list_runs, run_names

    directory = ctx.params.get("home_dir")
    try:
        names = run_names(list_runs(Home.at(directory) if directory else Home.default()))
    except (ArmillaryError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]
