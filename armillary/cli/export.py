"""`armillary convert … --to pt2|onnx`: a model as one file for `armillary serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from armillary.cli.open_model import need_torch, open_model
from armillary.cli.output import Output, path_text
from armillary.errors import BadInput
from armillary.store.converted_files import remember
from armillary.store.home import Home
from armillary.units import bytes_text

if TYPE_CHECKING:
    from torch import nn

    from armillary.model.export_graph import Input


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
    from armillary.model.python_module import is_python_module

    if is_python_module(model):
        module, wanted = _python_module(model, inputs)
    elif inputs:
        raise BadInput("--input is for Python files; a language model takes tokens")
    else:
        _, loaded = open_model(out, home, model, random_weights=random_weights, seed=seed, dtype=dtype, device="cpu")
        module, wanted = of_transformer(loaded)
    with out.progress(f"exporting to {target.name}"):
        made = export(module, wanted, target, form, rows=rows)
        remember(home, target)
    taken = "any number of rows" if made.rows is None else f"{made.rows} rows"
    out.say(
        f"{path_text(target.resolve())} · {bytes_text(made.bytes)} · takes {taken} · differs from the model by "
        f"{made.error:.1g} · serve it: armillary serve {path_text(target.resolve())}"
    )
    out.result({"file": str(target), "bytes": made.bytes, "rows": made.rows, "error": made.error}, quiet=str(target))


def _python_module(model: str, inputs: tuple[str, ...]) -> tuple[nn.Module, tuple[Input, ...]]:
    """The module that a Python file makes, and what it takes: as asked, or as the file's own examples."""
    from armillary.model.export_graph import like, parse_input
    from armillary.model.python_module import load_python_module

    module, examples = load_python_module(model)
    wanted = tuple(parse_input(text) for text in inputs) or like(examples)
    if not wanted:
        raise BadInput(f"the inputs of {model} are not known; give a row's shape, like --input 3x32x32")
    return module, wanted
