"""A model file as the server sees it, whatever made it: a schema, and arrays in, arrays out."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from armillary.errors import ArmillaryError, BadModel, missing
from armillary.serving.predict.batcher import Arrays
from armillary.serving.predict.schema import Field, Schema
from armillary.spec.tables.predict import Predict

_OPENERS = {".pt2": "pt2_model", ".pt": "torchscript_model", ".onnx": "onnx_model"}
_NEEDS = {".pt2": ("torch", "torch"), ".pt": ("torch", "torch"), ".onnx": ("onnxruntime", "onnx")}
_FREE = 8
"""size that a free dim is tried with"""


class Model(Protocol):
    """What an opener gives."""

    schema: Schema

    def run(self, arrays: Arrays) -> Arrays:
        """Outputs of a batch; called by one thread at a time."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that has run once."""

    model: Model
    schema: Schema
    """with what the trial run showed"""
    note: str = ""
    """what was learnt and is worth saying"""


def open_file(file: Path, settings: Predict) -> Loaded:
    """Load `file`, run it on made-up rows, and find out whether rows are independent."""
    package, extra = _NEEDS[file.suffix]
    try:
        opener = importlib.import_module(f"armillary.serving.predict.{_OPENERS[file.suffix]}")
        model: Model = opener.open_model(file, settings)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == package:
            raise missing(package, f"serving {file.name}", extra) from None
        raise
    except ArmillaryError:
        raise
    except Exception as error:  # libraries raise anything on a broken file
        said = " ".join(str(error).split())[:200]
        raise BadModel(f"{file} cannot be loaded ({said}); make it anew with armillary convert") from None
    return _tried(model, file)


def _tried(model: Model, file: Path) -> Loaded:
    """Rows together must give what they give alone; where they do not, each request is run by itself."""
    schema = model.schema
    if any(field.shape is None for field in schema.inputs):
        return Loaded(model=model, schema=schema, note="shapes are not in the file; requests are taken as they come")
    try:
        problem = _dependence(model, schema)
    except Exception as error:  # a model may raise anything
        said = " ".join(str(error).split())[:200]
        if any(None in (field.shape or ())[1:] for field in schema.inputs):  # the sizes we tried may be the reason
            return Loaded(model=model, schema=schema, note=f"not tried: it refused made-up rows ({said})")
        raise BadModel(f"{file} fails on a trial row ({said}); check what it was exported with") from None
    if problem:
        schema = replace(schema, batched=False, fixed_rows=None, why_not=problem)
    note = f"not batched: {schema.why_not}" if schema.why_not else ""
    return Loaded(model=model, schema=schema, note=note)


def _dependence(model: Model, schema: Schema) -> str:
    """Why rows cannot be run together; empty: they can."""
    rows = schema.fixed_rows or (min(3, schema.max_rows or 3) if schema.batched else 1)
    dice = np.random.default_rng(0)
    whole = [made_up(field, rows if schema.batched else None, dice) for field in schema.inputs]
    together = model.run(whole)
    if not schema.batched:
        return ""
    if any(output.ndim == 0 or len(output) != rows for output in together):
        return "an output has no dim of rows"
    if schema.fixed_rows == 1:
        return ""
    for i in range(min(rows, 3)):
        piece = [np.repeat(array[i : i + 1], schema.fixed_rows or 1, axis=0) for array in whole]
        try:
            alone = model.run(piece)
        except Exception:  # a model may raise anything
            return "it does not run on a single row"
        if not all(_near(a[0], b[i]) for a, b in zip(alone, together, strict=True)):
            return "a row's result depends on the rows beside it"
    return ""


def _near(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Equal to what reductions in another order leave: 1e-2 of the norm in half precision, 1e-3 else."""
    if one.dtype.kind != "f":
        return bool((one == other).mean() > 0.99) if one.size else True
    bound = 1e-2 if one.dtype.itemsize < 4 else 1e-3
    a: Any = one.astype(np.float64)
    b: Any = other.astype(np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.linalg.norm((a - b)[both])) <= bound * max(1e-6, float(np.linalg.norm(a[both])))


def made_up(field: Field, rows: int | None, dice: np.random.Generator) -> np.ndarray[Any, Any]:
    """An input that fits: normal numbers, or small whole ones."""
    assert field.shape is not None
    inner = [_FREE if size is None else size for size in (field.shape if rows is None else field.shape[1:])]
    shape = inner if rows is None else [rows, *inner]
    wanted = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    found: Any = dice.standard_normal(shape) if wanted.kind == "f" else dice.integers(0, 2, shape)
    return cast("np.ndarray[Any, Any]", found.astype(wanted))
