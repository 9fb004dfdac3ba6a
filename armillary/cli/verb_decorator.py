"""What every verb of the command line shares: --json, --quiet, --home, and errors in one line.

A verb is a function that takes an Output, a Home and its own arguments, named in `cli/verb_table.py`:

    @verb
    @click.argument("name", required=False, shell_complete=complete.models)
    @click.option("--limit", default=10, help="How many to list.")
    def models(out: Output, home: Home, name: str | None, limit: int) -> None:
        \"\"\"List the models of the catalogue, or everything known about one.\"\"\"
        names = catalogue.models()
        out.table("models", ["name"], [[name] for name in names])
        out.result(names, quiet=names)

A verb with sub-verbs is a VerbGroup: `data = VerbGroup("data", help="…")`, then `@data.verb` as above.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from armillary.cli.output import Mode, Output
from armillary.errors import nearest

if TYPE_CHECKING:
    from armillary.store.home import Home

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

set_option = click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key of the recipe; may be repeated."
)


yes_option = click.option("--yes", is_flag=True, help="Start what takes days without being asked.")
"""for verbs that ask before something long; shared, like --json"""


def _load_code(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value and not ctx.resilient_parsing:
        from armillary.spec.hf.user_family import load_family_file

        load_family_file(value)


model_code_option = click.option(
    "--model-code",
    metavar="FILE",
    expose_value=False,
    callback=_load_code,
    is_eager=True,
    help="Python file with the model's family, where it is your own.",
)
"""for verbs that take a model; shared, like --json. Verbs with a recipe have --set model.code=FILE"""


def moved(flag: str, now: str, *, is_flag: bool = False) -> Callable[..., Any]:
    """A removed flag, whose error names its replacement."""

    def refuse(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value:
            raise click.UsageError(f"{flag} is no more; {now}", ctx)

    how: dict[str, Any] = {"is_flag": True} if is_flag else {"multiple": True}
    return click.option(flag, f"_{flag.strip('-')}", hidden=True, expose_value=False, callback=refuse, **how)


def verb(function: Callable[..., None]) -> click.Command:
    """Make a click command of `function(out, home, **arguments)`; its docstring is the help."""

    @functools.wraps(function)
    def call(*, as_json: bool, quiet: bool, home_dir: str | None, **arguments: Any) -> None:
        mode: Mode = "json" if as_json else "quiet" if quiet else "human"
        function(out=Output(mode), home=home_at(home_dir), **arguments)

    own = list(reversed(getattr(function, "__click_params__", [])))
    name = function.__name__.rstrip("_").replace("_", "-")
    help_text = inspect.cleandoc(function.__doc__ or "")
    return click.Command(name, callback=call, params=own + _common(), help=help_text, context_settings=dict(CONTEXT))


class VerbGroup(click.Group):
    """A verb with sub-verbs."""

    def __init__(self, name: str, *, help: str) -> None:
        super().__init__(name, help=help, context_settings=dict(CONTEXT), no_args_is_help=False)

    def verb(self, function: Callable[..., None]) -> click.Command:
        """Like `verb`, and added to this group."""
        command = verb(function)
        self.add_command(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            refuse_verb(args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)


def refuse_verb(name: str, options: list[str], ctx: click.Context) -> NoReturn:
    """One line for a verb that does not exist, with the nearest that does."""
    guess = nearest(name, options)
    hint = f"did you mean {ctx.command_path} {guess}?" if guess else f"{ctx.command_path} takes {', '.join(options)}"
    raise click.UsageError(f"no verb '{name}'; {hint}", ctx)


def _common() -> list[click.Parameter]:
    return [
        click.Option(
            ["--home", "home_dir"],
            metavar="DIR",
            type=click.Path(file_okay=False),
            help="Folder of runs, data and measured peaks.",
        ),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print only the bare answer."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."),
    ]


def home_at(directory: str | None) -> Home:
    """The home that --home names, or the default one."""
    from armillary.store.home import Home

    return Home.at(directory) if directory else Home.default()


device_option = click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
quick_option = click.option("--quick", is_flag=True, help="Fewer sizes and shorter measurements.")
