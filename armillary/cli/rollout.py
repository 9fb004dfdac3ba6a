"""`armillary rollout`: another release for a service that runs, without dropping a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.errors import BadInput, NotFound
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.store.registry.release import Release


@verb
@click.argument("service", metavar="NAME")
@click.argument("release", required=False)
@click.option(
    "--canary", default=0.1, show_default=True, type=click.FloatRange(0, 0.99), help="Share of requests; 0: none."
)
@click.option("--requests", default=100, show_default=True, type=click.IntRange(1), help="Before canaries are judged.")
@click.option(
    "--slowdown", default=1.2, show_default=True, type=click.FloatRange(1), help="Most TTFT and ITL over others'."
)
@click.option("--eval", "evals", multiple=True, metavar="NAME=LEAST", help="Refuse a release whose result is below.")
def rollout(
    out: Output,
    home: Home,
    service: str,
    release: str | None,
    canary: float,
    requests: int,
    slowdown: float,
    evals: tuple[str, ...],
) -> None:
    """Replace what the service NAME serves by RELEASE, like bot:3; without RELEASE, show how its rollout stands.

    A canary gets a share of the requests first. It is promoted when it has answered enough without more errors or
    longer latencies than the others, and rolled back else; then replicas are replaced one by one.
    """
    from armillary.fleet.rollout.rollout_record import Rollout, begin_rollout, read_rollout
    from armillary.spec.toml.fields import to_plain
    from armillary.store.registry.open_registry import open_registry

    folder = home.work / "services" / service
    if not folder.is_dir():
        raise NotFound(f"no service '{service}' in this home; armillary up starts one")
    if release is not None:
        pinned = open_registry(home).resolve(release.removeprefix("registry:"))
        _check_evals(pinned, evals)
        asked = Rollout(
            release=f"registry:{pinned.text}", canary_fraction=canary, min_requests=requests, max_slowdown=slowdown
        )
        begin_rollout(folder, asked)
        out.say(f"the service begins within a second; armillary rollout {service} says how it stands")
    current = read_rollout(folder)
    if current is None:
        out.say(f"{service} has had no rollout; name a RELEASE to begin one")
        return out.result(None, quiet="none")
    out.fields("", [("release", current.release), ("state", current.state), ("reason", current.reason or None)])
    out.result(to_plain(current), quiet=current.state)


def _check_evals(release: Release, least: tuple[str, ...]) -> None:
    """BadInput where the release has no such result, or a lower one."""
    for text in least:
        name, _, value = text.partition("=")
        try:
            wanted = float(value)
        except ValueError:
            raise BadInput(f"--eval {text} is not understood; write it like --eval mmlu=0.6") from None
        result = release.manifest.evals.get(name)
        if result is None:
            raise BadInput(f"{release.text} has no result of {name}; push it with armillary registry push --eval")
        if result < wanted:
            raise BadInput(f"{release.text} has {name} = {result:g}, less than {wanted:g}; it is not rolled out")
