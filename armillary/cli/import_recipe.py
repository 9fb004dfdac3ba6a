"""`armillary import`: a configuration of torchtitan, DeepSpeed or Megatron-LM as a recipe."""

from __future__ import annotations

from pathlib import Path

import click

from armillary.cli import completion
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import verb
from armillary.errors import BadInput
from armillary.store.home import Home


@verb
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from", "kind", type=click.Choice(["torchtitan", "deepspeed", "megatron"]), help="[default: by its suffix]"
)
@click.option(
    "--model", default="", help="Catalogue name or folder, where the file names none.", shell_complete=completion.models
)
@click.option("--on", default="", help="Devices, like h100x64, where the file does not say how many.")
@click.option("--sequence", type=click.IntRange(1), help="Tokens per sequence, which DeepSpeed's file lacks.")
@click.option("--out", "target", type=click.Path(path_type=Path), help="Write the recipe there.  [default: print it]")
@click.option("--overwrite", is_flag=True, help="Replace an existing recipe.")
def import_(
    out: Output,
    home: Home,
    file: Path,
    kind: str | None,
    model: str,
    on: str,
    sequence: int | None,
    target: Path | None,
    overwrite: bool,
) -> None:
    """Make a recipe of FILE: torchtitan's TOML, DeepSpeed's JSON, or a script with Megatron-LM's arguments.

    Every key of FILE is listed: what it became, or why the recipe does not have it.
    """
    from armillary.spec.imported.key_map import Given
    from armillary.spec.imported.read_config import read_configuration, recipe_text
    from armillary.spec.recipe import to_dict

    imported = read_configuration(file, Given(model=model, on=on, sequence=sequence), kind)
    text = recipe_text(imported, file.name)
    if target is not None:
        if target.exists() and not overwrite:
            raise BadInput(f"{target} is already there; give --overwrite or another name")
        target.write_text(text, encoding="utf-8")
    out.table("taken over", ["key", "value", "recipe"], [[row.theirs, row.value, row.ours] for row in imported.mapped])
    out.table("left out", ["key", "value", "why"], [[row.theirs, row.value, row.reason] for row in imported.left_out])
    if not imported.mapped:
        out.warn(f"{file} has no key of {kind or 'such a configuration'} that a recipe has; --from says what it is")
    for note in imported.notes:
        out.say(f"note: {note}")
    out.say(path_text(target) if target else f"\n{text}")
    answer = {
        "recipe": to_dict(imported.recipe),
        "mapped": imported.mapped,
        "left_out": imported.left_out,
        "notes": imported.notes,
    }
    out.result(answer, quiet=str(target) if target else text)
