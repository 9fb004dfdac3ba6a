"""A model file of any format as a schema and a function of arrays."""

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from armillary.errors import ArmillaryError, BadModel, missing
from armillary.serving.predict.batcher import Arrays
from armillary.serving.predict.schema import Field, Schema
from armillary.spec.tables.serve import Predict

_OPENERS = {
    ".pt2": ("torch_model", "open_exported", "torch", "torch"),
    ".pt": ("torch_model", "open_torchscript", "torch", "torch"),
    ".onnx": ("onnx_model", "OnnxModel", "onnxruntime", "onnx"),
}
"""suffix -> module of this package and its opener, library that it needs, extra that installs the library"""
_FREE = 8
"""size of a free dimension in the test run"""


class Model(Protocol):
    """A model that an opener has loaded."""

    schema: Schema

    def run(self, arrays: Arrays) -> Arrays:
        """Outputs of a batch; for one thread at a time."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that has passed its test run, the schema as corrected by that run, and a remark for the user."""

    model: Model
    schema: Schema
    note: str = ""


def open_file(file: Path, settings: Predict) -> LoadedModel:
    """Load `file`, run it on random rows, and test whether rows are independent."""
    module, opener, library, extra = _OPENERS[file.suffix]
    try:
        model: Model = getattr(import_module(f"armillary.serving.predict.{module}"), opener)(file, settings)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == library:
            raise missing(library, f"serving {file.name}", extra) from None
        raise
    except ArmillaryError:
        raise
    except Exception as error:  # libraries raise anything on a broken file
        message = " ".join(str(error).split())[:200]
        raise BadModel(f"{file} cannot be loaded ({message}); export it again with armillary convert") from None
    return _test_run(model, file)


def _test_run(model: Model, file: Path) -> LoadedModel:
    """Rows must give the same results together and alone; where they do not, requests are not batched."""
    schema = model.schema
    if any(field.shape is None for field in schema.inputs):
        return LoadedModel(
            model=model, schema=schema, note="the file does not state shapes; requests are not checked against them"
        )
    try:
        problem = _dependence(model, schema)
    except Exception as error:  # a model may raise anything
        message = " ".join(str(error).split())[:200]
        if any(None in (field.shape or ())[1:] for field in schema.inputs):  # the test run's sizes may be the reason
            return LoadedModel(model=model, schema=schema, note=f"not tested: it failed on random rows ({message})")
        raise BadModel(f"{file} fails on a test row ({message}); check how it was exported") from None
    if problem:
        schema = replace(schema, batched=False, fixed_rows=None, why_not_batched=problem)
    note = f"not batched: {schema.why_not_batched}" if schema.why_not_batched else ""
    return LoadedModel(model=model, schema=schema, note=note)


def _dependence(model: Model, schema: Schema) -> str:
    """Why rows cannot be batched; empty: they can."""
    rows = schema.fixed_rows or (min(3, schema.max_rows or 3) if schema.batched else 1)
    rng = np.random.default_rng(0)
    inputs = [random_input(field, rows if schema.batched else None, rng) for field in schema.inputs]
    batch = model.run(inputs)
    if not schema.batched:
        return ""
    if any(output.ndim == 0 or len(output) != rows for output in batch):
        return "an output has no dimension of rows"
    if schema.fixed_rows == 1:
        return ""
    for i in range(min(rows, 3)):
        row = [np.repeat(array[i : i + 1], schema.fixed_rows or 1, axis=0) for array in inputs]
        try:
            alone = model.run(row)
        except Exception:  # a model may raise anything
            return "it does not run on a single row"
        if not all(_near(a[0], b[i]) for a, b in zip(alone, batch, strict=True)):
            return "a row's result depends on the rows beside it"
    return ""


def _near(alone: np.ndarray[Any, Any], batched: np.ndarray[Any, Any]) -> bool:
    """Equal up to the order of reductions: 1e-2 of the norm in 16-bit dtypes, 1e-3 else."""
    if alone.dtype.kind != "f":
        return bool((alone == batched).mean() > 0.99) if alone.size else True
    bound = 1e-2 if alone.dtype.itemsize < 4 else 1e-3
    finite = np.isfinite(alone) & np.isfinite(batched)
    a, b = alone[finite].astype(np.float64), batched[finite].astype(np.float64)
    return float(np.linalg.norm(a - b)) <= bound * max(1e-6, float(np.linalg.norm(a)))


def random_input(field: Field, rows: int | None, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A random input of a field: normal floats, or 0 and 1."""
    assert field.shape is not None
    inner = [_FREE if size is None else size for size in (field.shape if rows is None else field.shape[1:])]
    shape = inner if rows is None else [rows, *inner]
    wanted = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    values: Any = rng.standard_normal(shape) if wanted.kind == "f" else rng.integers(0, 2, shape)
    return cast("np.ndarray[Any, Any]", values.astype(wanted))
