"""`armillary profile`: where the time of a step goes, of a recipe, a script, a callable or a trace."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli.open_model import need_torch
from armillary.cli.output import Output, path_text
from armillary.cli.profile.step import callable_step, recipe_step
from armillary.cli.profile.tables import say_comparison, say_profile
from armillary.cli.progress import on_bar
from armillary.cli.verb_decorator import set_option, verb
from armillary.errors import BadInput, NotFound
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, save_peaks

if TYPE_CHECKING:
    from armillary.profiling.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asked for: steps to record, the file of the trace, overrides and device of a recipe, and
    whether a script ends when it has been recorded."""

    steps: int
    trace: Path | None
    overrides: tuple[str, ...]
    device: str | None
    stop: bool


@verb
@click.argument("target", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TARGET")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="How many steps to record.")
@click.option(
    "--html",
    default="profile.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the page.",
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="File for the trace, for Perfetto.")
@click.option(
    "--compare",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="An earlier trace, or what --json printed.",
)
@click.option("--stop", is_flag=True, help="End the script when its steps are recorded.")
@click.option("--device", help="cpu, cuda … for a recipe.  [default: the best there is]")
@set_option
def profile(
    out: Output,
    home: Home,
    target: tuple[str, ...],
    steps: int,
    html: Path,
    trace: Path | None,
    compare: Path | None,
    stop: bool,
    device: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Say where the time of a step goes, against what this machine was measured to reach.

    TARGET is a recipe (its training step), a trace of torch.profiler or an nsys SQLite export, MODULE:FUNCTION, or a
    script as it is: armillary profile -- python train.py --its options.
    """
    from armillary.profiling.report.profile_page import write_page

    asked = Asked(steps=steps, trace=trace, overrides=overrides, device=device, stop=stop)
    for option, path in (("--html", html), ("--trace", trace)):
        if path:
            check_folder(option, path)
    before = read_file(compare, home) if compare else None
    profiled, code = _profile(out, home, target, asked)
    say_profile(out, profiled)
    comparison = say_comparison(out, before, profiled) if before else None
    write_page(profiled, html, comparison)
    out.say(f"report: {path_text(html.absolute())} (roofline, gaps, memory)")
    if trace:
        out.say(f"trace: {path_text(trace.absolute())}, for ui.perfetto.dev")
    answer = {"profile": profiled, "comparison": comparison} if comparison else profiled
    out.result(answer, quiet=str(html))
    if code:
        raise click.exceptions.Exit(code)


def _profile(out: Output, home: Home, target: tuple[str, ...], asked: Asked) -> tuple[Profile, int]:
    """The profile, and the exit code of a script."""
    name = target[0]
    if Path(name).name.startswith(("python", "torchrun")) and len(target) > 1:
        return _script(out, home, target, asked)
    if len(target) > 1:
        raise BadInput(f"'{' '.join(target[1:])}' comes after {name}; a script is profiled with -- python {name} …")
    if name.endswith(".toml"):
        return _step(out, home, name, asked), 0
    if asked.overrides or asked.device:
        raise BadInput(f"--set and --device are for recipes, and {name} is none; leave them out")
    if is_readable(name):
        return read_file(Path(name), home), 0
    if name.endswith(".py"):
        raise BadInput(f"{name} is a script; write armillary profile -- python {name}")
    if ":" in name:
        return _step(out, home, name, asked), 0
    raise NotFound(f"nothing to profile in '{name}'; give a recipe.toml, a trace, MODULE:FUNCTION or -- python SCRIPT")


def _script(out: Output, home: Home, target: tuple[str, ...], asked: Asked) -> tuple[Profile, int]:
    if asked.overrides or asked.device:
        raise BadInput("--set and --device are for recipes; give a script its own options after its name")
    from armillary.profiling.record.profile_script import parse, profile_script

    parse(target)
    measure_once(out, home)
    # with --json or --quiet stdout is for the answer alone
    stdout = None if out.mode == "human" else sys.stderr.fileno()
    sys.stdout.flush()
    ran = profile_script(target, home=home, steps=asked.steps, stop=asked.stop, trace_path=asked.trace, stdout=stdout)
    if ran.code:
        out.warn(f"the script ended with exit code {ran.code}; the profile is of what ran before")
    return ran.profile, ran.code


def _step(out: Output, home: Home, name: str, asked: Asked) -> Profile:
    need_torch("profiling")
    from armillary.profiling.record.profile_callable import profile as capture

    make = recipe_step if name.endswith(".toml") else callable_step
    with make(out, home, name, asked.overrides, asked.device) as step:
        measure_once(out, home, asked.device)
        out.say(f"profiling {asked.steps} steps of {name}")
        return capture(step, steps=asked.steps, home=home, trace_path=asked.trace, source=name)


_NEEDED = ("bandwidth", "gemm", "attention", "launch")


def measure_once(out: Output, home: Home, device: str | None = None) -> None:
    """Measure and store what the roofline needs; without torch in this environment the catalogue is used."""
    if find_spec("torch") is None:
        return
    from armillary.model.device import fit_threads, pick_device
    from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of

    fit_threads()
    target = pick_device(device)
    peaks = load_peaks(home, name_of(target))
    if peaks is not None and peaks.best_copy() and peaks.points.get("gemm"):
        return
    out.say(
        f"no ceilings of {name_of(target)} yet: a quick measurement now; armillary bench ceilings makes a thorough one"
    )
    with out.progress("measuring", unit="case") as bar:
        measured = measure_ceilings(target, quick=True, only=_NEEDED, watch=on_bar(bar))
    save_peaks(home, measured.peaks)


_HEAD = 4096
_BEGINNINGS = (b"{", b"[", b"\x1f\x8b", b"SQLite format 3\x00")
"""JSON, gzip, and an nsys export"""
_NAMES = (".json", ".json.gz", ".gz", ".sqlite")


def is_readable(name: str) -> bool:
    """Whether a name is a trace or a profile: by its suffix, else by the file's content."""
    return name.endswith(_NAMES) or _head(Path(name)).startswith(_BEGINNINGS)


def read_file(path: Path, home: Home) -> Profile:
    """A profile; of a trace, compared with the roofline of the device it names."""
    from armillary.profiling.analysis.analyse import analyse_file

    return _read_profile(path) if _holds_profile(path) else analyse_file(path, home, source=str(path))


def check_folder(option: str, path: Path) -> None:
    """Refuse at the beginning what could not be written at the end."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise NotFound(f"no folder {folder} for {option} {path}; make it, or name another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise BadInput(f"{option} {path} cannot be written; name another file")


def _read_profile(path: Path) -> Profile:
    """The output of --json, also with --compare, where the profile is beside the comparison."""
    from armillary.profiling.profile import Profile

    text = path.read_text()
    if _head(path)[1:].lstrip().startswith(b'"profile"'):
        try:
            text = json.dumps(json.loads(text).get("profile"))
        except ValueError as error:
            raise BadInput(f"{path} is not JSON ({error}); profile again") from None
    return Profile.from_json(text, str(path))


def _holds_profile(path: Path) -> bool:
    """Told from its beginning: a trace may be too large to read twice."""
    head = _head(path)
    return head.startswith(b"{") and b'"wall_s"' in head and b'"traceEvents"' not in head


def _head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
