"""`armillary rollout`: another release for a service that runs, without dropping a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from armillary.cli.output import Output
from armillary.cli.verb_decorator import verb
from armillary.errors import BadInput, NotFound
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.store.registry.registry import Registry
    from armillary.store.registry.release import Release

_STRATEGIES = ("canary", "rolling", "blue-green", "shadow")


@verb
@click.argument("service", metavar="NAME")
@click.argument("release", required=False)
@click.option(
    "--strategy", type=click.Choice(_STRATEGIES), default="canary", show_default=True, help="How it is introduced."
)
@click.option(
    "--share", default=0.1, show_default=True, type=click.FloatRange(0, 1, True, True), help="Of requests, judged by."
)
@click.option("--requests", default=100, show_default=True, type=click.IntRange(1), help="Least for a promotion.")
@click.option(
    "--errors",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0, 1, True, True),
    help="Tolerated, over others'.",
)
@click.option(
    "--slowdown", default=1.2, show_default=True, type=click.FloatRange(1, None, True), help="Tolerated TTFT and TPOT."
)
@click.option("--eval", "evals", multiple=True, metavar="NAME[=LEAST]", help="Refuse a release whose result is below.")
@click.option("--roll-back", "back", is_flag=True, help="End a rollout, or undo the last one.")
def rollout(
    out: Output,
    home: Home,
    service: str,
    release: str | None,
    strategy: str,
    share: float,
    requests: int,
    errors: float,
    slowdown: float,
    evals: tuple[str, ...],
    back: bool,
) -> None:
    """Replace what the service NAME serves by RELEASE, like bot:3; without RELEASE, show how its rollout stands.

    canary: one replica gets a share of the requests. It is rolled back as soon as a test says that it has more errors
    or longer latencies than the others, and promoted once the tests say that it has not; then replicas are replaced
    one by one. blue-green: a complete new set gets all requests at once, is judged the same way, and the old set takes
    over again if it is worse. shadow: one replica gets copies of a share of the requests, no client its answers; the
    verdict is noted, and nothing is replaced. rolling: replicas are replaced one by one, without a test.

    --eval NAME wants a result in the registry at least as good as that of the release that serves now.
    """
    from armillary.fleet.rollout.rollout_record import Rollout, begin_rollout, read_rollout, roll_back
    from armillary.spec.toml.fields import build, to_plain
    from armillary.store.registry.open_registry import open_registry

    folder = home.work / "services" / service
    if not folder.is_dir():
        raise NotFound(f"no service '{service}' in this home; armillary up starts one")
    if back:
        roll_back(folder)
        out.say(f"the old release is back within a moment; armillary rollout {service} says how it stands")
    elif release is not None:
        store = open_registry(home)
        pinned = store.resolve(release.removeprefix("registry:"))
        _check_evals(store, pinned, evals)
        asked = {
            "release": f"registry:{pinned.text}",
            "strategy": strategy,
            "share": share,
            "min_requests": requests,
            "max_error_fraction": errors,
            "max_slowdown": slowdown,
        }
        begin_rollout(folder, build(Rollout, asked, "rollout"))
        out.say(f"the service begins within a second; armillary rollout {service} says how it stands")
    current = read_rollout(folder)
    if current is None:
        out.say(f"{service} has had no rollout; name a RELEASE to begin one")
        return out.result(None, quiet="none")
    shown = [("release", current.release or "the recipe's own"), ("strategy", current.strategy)]
    out.fields("", [*shown, ("state", current.state), ("reason", current.reason or None)])
    out.result(to_plain(current), quiet=current.state)


def _check_evals(store: Registry, release: Release, wanted: tuple[str, ...]) -> None:
    """BadInput where the release has no such result, or a lower one."""
    for text in wanted:
        name, given, value = text.partition("=")
        least = _least(store, release, name, text, value if given else None)
        result = release.manifest.evals.get(name)
        if result is None:
            raise BadInput(f"{release.text} has no result of {name}; push it with armillary registry push --eval")
        if result < least:
            raise BadInput(f"{release.text} has {name} = {result:g}, less than {least:g}; it is not rolled out")


def _least(store: Registry, release: Release, name: str, text: str, value: str | None) -> float:
    """What was asked for, or the result of the release in production."""
    if value is None:
        present = store.resolve(f"{release.name}@production")
        if name not in present.manifest.evals:
            raise BadInput(f"{present.text}, in production, has no result of {name}; write --eval {name}=LEAST")
        return float(present.manifest.evals[name])
    try:
        return float(value)
    except ValueError:
        raise BadInput(f"--eval {text} is not understood; write it like --eval mmlu=0.6") from None
