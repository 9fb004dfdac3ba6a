"""A model file of any format as a schema and a function of arrays."""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from armillary.errors import ArmillaryError, BadModel, missing
from armillary.serving.predict.batcher import Arrays
from armillary.serving.predict.schema import Field, Schema
from armillary.spec.tables.serve import Predict

_OPENERS = {".pt2": "pt2_model", ".pt": "torchscript_model", ".onnx": "onnx_model"}
_NEEDS = {".pt2": ("torch", "torch"), ".pt": ("torch", "torch"), ".onnx": ("onnxruntime", "onnx")}
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
        schema = replace(schema, batched=False, fixed_rows=None, why_not=problem)
    note = f"not batched: {schema.why_not}" if schema.why_not else ""
    return LoadedModel(model=model, schema=schema, note=note)


def _dependence(model: Model, schema: Schema) -> str:
    """Why rows cannot be batched; empty: they can."""
    rows = schema.fixed_rows or (min(3, schema.max_rows or 3) if schema.batched else 1)
    rng = np.random.default_rng(0)
    inputs = [random_input(field, rows if schema.batched else None, rng) for field in schema.inputs]
    together = model.run(inputs)
    if not schema.batched:
        return ""
    if any(output.ndim == 0 or len(output) != rows for output in together):
        return "an output has no dimension of rows"
    if schema.fixed_rows == 1:
        return ""
    for i in range(min(rows, 3)):
        row = [np.repeat(array[i : i + 1], schema.fixed_rows or 1, axis=0) for array in inputs]
        try:
            alone = model.run(row)
        except Exception:  # a model may raise anything
            return "it does not run on a single row"
        if not all(_near(a[0], b[i]) for a, b in zip(alone, together, strict=True)):
            return "a row's result depends on the rows beside it"
    return ""


def _near(alone: np.ndarray[Any, Any], together: np.ndarray[Any, Any]) -> bool:
    """Equal up to the order of reductions: 1e-2 of the norm in 16-bit dtypes, 1e-3 else."""
    if alone.dtype.kind != "f":
        return bool((alone == together).mean() > 0.99) if alone.size else True
    bound = 1e-2 if alone.dtype.itemsize < 4 else 1e-3
    a: Any = alone.astype(np.float64)
    b: Any = together.astype(np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.linalg.norm((a - b)[both])) <= bound * max(1e-6, float(np.linalg.norm(a[both])))


def random_input(field: Field, rows: int | None, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A random input of a field: normal floats, or 0 and 1."""
    assert field.shape is not None
    inner = [_FREE if size is None else size for size in (field.shape if rows is None else field.shape[1:])]
    shape = inner if rows is None else [rows, *inner]
    wanted = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    values: Any = rng.standard_normal(shape) if wanted.kind == "f" else rng.integers(0, 2, shape)
    return cast("np.ndarray[Any, Any]", values.astype(wanted))
