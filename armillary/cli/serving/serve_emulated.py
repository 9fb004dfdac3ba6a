"""`armillary serve` with serve.emulate: the server and the engine's process, but a step only sleeps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import click

from armillary.cli.open_model import find_model
from armillary.cli.output import Output
from armillary.errors import BadInput
from armillary.spec.recipe import Recipe
from armillary.store.home import Home


def serve_emulated(out: Output, home: Home, model: str, asked: Recipe, *, host: str, port: int) -> None:
    """Serve a folder with a config and a tokenizer; it needs no weights."""
    from armillary.cli.plan.options import find_cluster
    from armillary.planning.simulation.fleet_case import fleet_case
    from armillary.planning.simulation.sleeping_engine import SleepingConfig
    from armillary.serving.http.server import listen_options
    from armillary.serving.openai.run_server import serve as run

    source = find_model(out, home, model, need_weights=False)
    if source.files is None:
        raise BadInput(f"{model} has no files on this machine; name a folder with config.json and tokenizer.json")
    case = fleet_case(asked, source.config, find_cluster(asked), home)
    say = partial(click.echo, err=out.mode != "human")
    say(f"emulated: nothing is computed, step times are of the {case.cost.basis}")
    config = SleepingConfig(
        model=str(source.files),
        serve=asked.serve,
        home=home,
        system=case.system,
        cost=case.cost,
        start_s=asked.fleet.start_s or 0.0,
    )
    run(replace(source, folder=source.files), config, listen_options(host, port, asked.serve), say=say)
