"""TorchScript models (.pt): the file states no shapes; they are derived from the first layer where possible."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from armillary.errors import BadModel
from armillary.serving.predict.schema import Field, Schema, Shape
from armillary.serving.predict.torch_model import TorchModel, device_of
from armillary.spec.tables.serve import Predict

_CONVOLUTIONS = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution", "aten::convolution")


def open_model(file: Path, settings: Predict) -> TorchModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; files of it are not
        try:
            loaded = torch.jit.load(str(file), map_location=device_of(settings))
        except RuntimeError as error:
            if "constants.pkl" in str(error) or "PytorchStreamReader" in str(error):
                raise BadModel(
                    f"{file} is not TorchScript (weights alone, or a pickled module); export the module "
                    "with armillary convert FILE.py:NAME model.pt2 --to pt2"
                ) from None
            raise
        module = torch.jit.freeze(loaded.eval())
    schema = Schema(inputs=_inputs(module), outputs=(Field(name="output", dtype="float32", shape=None),), batched=True)

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tensors_out = [leaf for leaf in pytree.tree_leaves(module(*tensors)) if isinstance(leaf, torch.Tensor)]
        if len(tensors_out) != 1:
            raise BadModel(f"{file} returns {len(tensors_out)} tensors; export it with armillary convert --to pt2")
        return tensors_out

    return TorchModel(call, schema, settings)


def _inputs(module: Any) -> tuple[Field, ...]:
    values = list(module.graph.inputs())[1:]  # the first is the module
    if not values:
        raise BadModel("it takes no tensor; export a module that takes one")
    return tuple(_field(value) for value in values)


def _field(value: Any) -> Field:
    """Dtype and shape of an input, from the first operation that reads it."""
    name = value.debugName().split(".")[0]
    for use in value.uses():
        operation, inputs = use.user, list(use.user.inputs())
        weights = [node.toIValue() for node in inputs if isinstance(node.toIValue(), torch.Tensor)]
        dtype = str(weights[0].dtype).removeprefix("torch.") if weights else "float32"
        shape = _shape(operation.kind(), weights, inputs)
        if operation.kind() == "aten::embedding":
            return Field(name=name, dtype="int64", shape=shape)
        if shape is not None:
            return Field(name=name, dtype=dtype, shape=shape)
    return Field(name=name, dtype="float32", shape=None)


def _shape(kind: str, weights: list[torch.Tensor], inputs: list[Any]) -> Shape | None:
    if not weights:
        return None
    weight = weights[0]
    if kind == "aten::linear":
        return (None, weight.shape[1])
    if kind == "aten::embedding":
        return (None, None)
    if kind in _CONVOLUTIONS:
        groups = next((node.toIValue() for node in reversed(inputs) if type(node.toIValue()) is int), 1)
        return (None, weight.shape[1] * groups, *[None] * (weight.ndim - 2))
    return None
