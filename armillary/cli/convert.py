"""`armillary convert`: any model this program can name, rewritten as a Hugging Face folder or as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from armillary.cli import completion
from armillary.cli.open_model import need_torch, open_model
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import model_code_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.store.trusted_conversions import remember
from armillary.units import bytes_text, count_text, parse_count

if TYPE_CHECKING:
    from torch import nn

    from armillary.model.export_graph import Input


@verb
@click.argument("model", shell_complete=completion.models)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--dtype", help="fp32, bf16, fp16 or fp64.  [default: as it is]")
@click.option("--random-weights", is_flag=True, help="Make weights for a shape that has none.")
@click.option("--seed", default=0, show_default=True, help="Of the random weights.")
@click.option("--shard-size", default="5GB", show_default=True, help="Largest weight file.")
@click.option("--overwrite", is_flag=True, help="Replace an existing folder or file.")
@click.option(
    "--to",
    "form",
    type=click.Choice(["hf", "pt2", "onnx"]),
    default="hf",
    show_default=True,
    help="A Hugging Face folder, or one file for `armillary serve` and other runtimes.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE",
    help="Of FILE.py:NAME: a row of each input, like 3x32x32, int64:128 or float32:*x80.",
)
@click.option("--rows", type=click.IntRange(1), help="Fix the number of rows of pt2 and onnx.  [default: any]")
@model_code_option
def convert(
    out: Output,
    home: Home,
    model: str,
    target: Path,
    dtype: str | None,
    random_weights: bool,
    seed: int,
    shard_size: str,
    overwrite: bool,
    form: Literal["hf", "pt2", "onnx"],
    inputs: tuple[str, ...],
    rows: int | None,
) -> None:
    """Write MODEL to the folder TARGET: config.json, safetensors, tokenizer; or as one file with --to.

    MODEL is a Hugging Face folder, a Hub id, a run, or with --random-weights any name of the catalogue; with --to pt2
    or onnx also FILE.py:NAME, a torch module or what makes one.
    """
    if form != "hf":
        return export_model(
            out,
            home,
            model,
            target,
            form,
            inputs=inputs,
            rows=rows,
            dtype=dtype,
            random_weights=random_weights,
            seed=seed,
            overwrite=overwrite,
        )
    if inputs or rows:
        raise BadInput("--input and --rows are for --to pt2 and --to onnx; leave them out for a folder")
    shard_bytes = parse_count(shard_size)
    source, loaded = open_model(
        out, home, model, random_weights=random_weights, seed=seed, dtype=dtype, device="cpu", to_write=True
    )
    from armillary.model.weights.hf_weights import save_model

    with out.progress("writing", unit="tensor") as bar:
        save_model(loaded, target, template=source.files, shard_bytes=shard_bytes, overwrite=overwrite, progress=bar.at)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    parameters = sum(p.numel() for p in loaded.parameters())
    out.say(f"{target} · {count_text(parameters)} parameters · {bytes_text(size)} in safetensors")
    out.result({"folder": str(target), "parameters": parameters, "bytes": size}, quiet=str(target))


def export_model(
    out: Output,
    home: Home,
    model: str,
    target: Path,
    form: Literal["pt2", "onnx"],
    *,
    inputs: tuple[str, ...],
    rows: int | None,
    dtype: str | None,
    random_weights: bool,
    seed: int,
    overwrite: bool,
) -> None:
    """Write `model` to the file `target` and say how it was checked."""
    if target.suffix != f".{form}":
        raise BadInput(f"{target} does not end in .{form}; call it {target.with_suffix('.' + form)}")
    if target.exists() and not overwrite:
        raise BadInput(f"{target} is already there; give --overwrite or another name")
    need_torch("exporting a model")
    from armillary.model.export_graph import export, of_transformer
    from armillary.model.user_module import is_python_module

    if is_python_module(model):
        module, wanted = _python_module(model, inputs)
    elif inputs:
        raise BadInput("--input is for Python files; a language model takes tokens")
    else:
        _, loaded = open_model(out, home, model, random_weights=random_weights, seed=seed, dtype=dtype, device="cpu")
        module, wanted = of_transformer(loaded)
    with out.progress(f"exporting to {target.name}"):
        exported = export(module, wanted, target, form, rows=rows)
        remember(home, target)
    taken = "any number of rows" if exported.rows is None else f"{exported.rows} rows"
    out.say(
        f"{path_text(target.resolve())} · {bytes_text(exported.bytes)} · takes {taken} · differs from the model by "
        f"{exported.error:.1g} · serve it: armillary serve {path_text(target.resolve())}"
    )
    out.result(
        {"file": str(target), "bytes": exported.bytes, "rows": exported.rows, "error": exported.error},
        quiet=str(target),
    )


def _python_module(model: str, inputs: tuple[str, ...]) -> tuple[nn.Module, tuple[Input, ...]]:
    """The module that a Python file makes, and what it takes: as asked, or as the file's own examples."""
    from armillary.model.export_graph import inputs_like, parse_input
    from armillary.model.user_module import load_python_module

    module, examples = load_python_module(model)
    wanted = tuple(parse_input(text) for text in inputs) or inputs_like(examples)
    if not wanted:
        raise BadInput(f"the inputs of {model} are not known; give a row's shape, like --input 3x32x32")
    return module, wanted
