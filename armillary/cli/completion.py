"""`armillary completion`: the script that makes TAB complete verbs, options and names."""

import click

from armillary.cli.output import Output
from armillary.cli.verb_decorator import home_at, verb
from armillary.errors import ArmillaryError
from armillary.store.home import Home

_INSTALL = {
    "bash": 'eval "$(armillary completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(armillary completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "armillary completion fish > ~/.config/fish/completions/armillary.fish",
}


@verb
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def completion(out: Output, home: Home, shell: str) -> None:
    """Print the completion script of SHELL; its first line says how to install it."""
    script = completion_script(shell)
    out.say(f"# {_INSTALL[shell]}\n{script}")
    out.result({"shell": shell, "install": _INSTALL[shell], "script": script}, quiet=script)


def completion_script(shell: str) -> str:
    """What the shell sources: click asks `armillary` itself for the words."""
    from click.shell_completion import get_completion_class

    from armillary.cli.main import command

    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no {shell}"
    return kind(command(), {}, "armillary", "_ARMILLARY_COMPLETE").source().strip()


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
    from armillary.store.runs import list_runs, run_names

    try:
        names = run_names(list_runs(home_at(ctx.params.get("home_dir"))))
    except (ArmillaryError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of the jobs that were started from here, newest first."""
    from armillary.cluster.job import list_jobs

    try:
        names = [job.name for job in list_jobs(home_at(ctx.params.get("home_dir")))]
    except (ArmillaryError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]
