"""`armillary serve model.pt2`: a model file behind /predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from armillary.cli.output import Output
from armillary.errors import BadInput
from armillary.store.home import Home


def serve_file(
    out: Output,
    home: Home,
    path: Path,
    *,
    host: str,
    port: int,
    device: str | None,
    recipe: Path | None,
    overrides: tuple[str, ...],
    trust: bool = False,
) -> None:
    """Serve the model file, or folder of versions, at `path` with the recipe's [predict] table and [serve]'s keys."""
    from armillary.serving.http.api_keys import read_keys
    from armillary.serving.predict.run_server import run
    from armillary.serving.predict.trust import Trust
    from armillary.spec.recipe import load_recipe, recipe_from_dict

    for text in overrides:
        if not text.startswith(("predict.", "serve.api_key_file=")):
            raise BadInput(f"--set {text} is not of [predict], the table for model files; like predict.max_batch=64")
    made = load_recipe(recipe, overrides) if recipe else recipe_from_dict({"model": {"name": "file"}}, overrides)
    settings = replace(made.predict, device=device) if device else made.predict
    run(
        path,
        settings,
        trust=Trust(home, every_file=trust),
        keys=read_keys(made.serve.api_key_file),
        host=host,
        port=port,
        say=lambda text: click.echo(text, err=out.mode != "human"),
    )
