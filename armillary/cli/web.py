"""`armillary web`: plans, catalogue, runs, servers and diagnoses as a page in the browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.store.home import Home


@verb
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 needs the token.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@click.option("--write", "writes", is_flag=True, help="Let Diagnose write changed recipes into this folder.")
def web(out: Output, home: Home, host: str, port: int, opens: bool, writes: bool) -> None:
    """Serve a page: plan while you type, catalogue, runs, a server's gauges, diagnoses. Read-only without --write.

    Where others can reach the address, the page needs the token that is printed with it.
    """
    from armillary.serving.http.server import ListenOptions
    from armillary.web.run_web import run_web

    say = partial(click.echo, err=out.mode != "human")
    run_web(home, ListenOptions(host=host, port=port), say=say, opens=opens, writes=Path.cwd() if writes else None)
