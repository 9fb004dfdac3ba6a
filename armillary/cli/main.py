"""The `armillary` command: finds the verb, runs it, and turns errors into one line and an exit code.

Only click and the table of verbs are imported here; torch, rich and numpy come with the verbs that need them.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from armillary import __version__
from armillary.cli.verb_table import RINGS, VERBS
from armillary.errors import ArmillaryError, missing, nearest

OK, BUG, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
_MACHINE_ERRORS = {errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR}
_INTRO = """Plan, train, serve and diagnose transformer models.

Any verb takes --json, --quiet and --home after it; `armillary VERB --help` says more."""


class LazyGroup(click.Group):
    """The top of the command line: lists verbs from the table and imports one when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = VERBS.get(cmd_name)
        if row is None:
            return None
        module, attribute = row.target.split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), f"{row.target} is not a verb"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not ctx.resilient_parsing:
            guess = nearest(args[0], VERBS)
            hint = f"did you mean {guess}?" if guess else "armillary --help lists them"
            raise click.UsageError(f"no verb '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))
        for ring, title in RINGS.items():
            rows = [(verb.name.ljust(width), verb.help) for verb in VERBS.values() if verb.ring == ring]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(verb.name, help=verb.help) for verb in VERBS.values() if verb.name.startswith(incomplete)
        ]


def command() -> click.Group:
    """The complete command line as a click object."""

    def show_help(ctx: click.Context) -> None:
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())

    group = LazyGroup(
        "armillary",
        callback=click.pass_context(show_help),
        help=_INTRO,
        invoke_without_command=True,
        subcommand_metavar="VERB ...",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    return click.version_option(__version__, prog_name="armillary", message="%(prog)s %(version)s")(group)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for what the user can put right, 1 for a bug, 130 for ^C."""
    args = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        code = command().main(args, prog_name="armillary", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader left (`| head`): the interpreter's last flush goes elsewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BUG
    except Exception as error:
        return _report(error, as_json="--json" in (args[: args.index("--")] if "--" in args else args))


def _prepare_streams() -> None:
    """Output that the terminal cannot show, or a closed pipe, is no reason to fail."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def _report(error: Exception, *, as_json: bool) -> int:
    known = user_error(error)
    if known is None:
        import traceback  # only a bug needs it

        traceback.print_exc()
        print("a bug in armillary: please report the lines above and `armillary doctor --json`", file=sys.stderr)
        return BUG
    message, kind = known
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        from armillary.cli.output import json_text

        with contextlib.suppress(OSError):  # the error may be that stdout cannot be written
            print(json_text({"error": message, "kind": kind}), flush=True)
    return USER_ERROR


def user_error(error: Exception) -> tuple[str, str] | None:
    """(line, kind) of an error that the user can put right; None for a bug of ours."""
    if isinstance(error, ArmillaryError):
        return " ".join(str(error).split()), type(error).__name__
    if isinstance(error, click.ClickException):
        return _usage_line(error), "Usage"
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        where = error.filename or "writing"
        return f"{where}: {error.strerror}; check the path, its permissions and the disk", "Machine"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_extra(error.name)
    return None


def _usage_line(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx else "armillary"
    if isinstance(error, click.NoSuchOption) and ctx:
        message = f"{path} has no option {error.option_name}{_option_hint(error.option_name, ctx)}"
    else:
        message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    return message if "; " in message else f"{message}; {path} --help says what it takes"


def _option_hint(name: str, ctx: click.Context) -> str:
    if ctx.parent is None and name in ("--json", "--quiet", "-q", "--home"):
        return "; put it after the verb"
    options = {option.lstrip("-"): option for param in ctx.command.params for option in param.opts}
    guess = nearest(name.lstrip("-"), options)
    return f"; did you mean {options[guess]}?" if guess else ""


def _missing_extra(module: str) -> tuple[str, str] | None:
    from armillary.machine.doctor import EXTRAS

    top = module.split(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if top in modules), None)
    return (str(missing(top, "this verb", extra)), "MissingPart") if extra else None
