"""Models that torch runs: files of torch.export (.pt2), which state shapes, dtypes and free dimensions, and TorchScript
(.pt), which states no shapes; they are derived from the first layer where possible."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from armillary.errors import BadInput, BadModel
from armillary.kernels.core.torch_compat import load_program
from armillary.model.device import fit_threads
from armillary.serving.predict.batcher import Arrays
from armillary.serving.predict.schema import Field, Schema, Shape, fixed_schema
from armillary.spec.tables.serve import Predict

_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_CONVOLUTIONS = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution", "aten::convolution")


class TorchModel:
    """Runs a torch callable on arrays: dtypes, device, threads, no gradients."""

    def __init__(
        self, call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], schema: Schema, settings: Predict
    ) -> None:
        self.schema, self._call = schema, call
        self._device = _device(settings)
        self._dtypes = [getattr(torch, field.dtype) for field in schema.inputs]
        if settings.threads:
            torch.set_num_threads(settings.threads)
        else:
            fit_threads()

    def run(self, arrays: Arrays) -> Arrays:
        with torch.inference_mode():
            tensors = [
                torch.from_numpy(array).to(self._device, dtype)
                for array, dtype in zip(arrays, self._dtypes, strict=True)
            ]
            return [_array(output) for output in self._call(tensors)]


def _device(settings: Predict) -> torch.device:
    try:
        return torch.device(settings.device)
    except RuntimeError:
        raise BadInput(f"no device '{settings.device}'; use cpu or cuda") from None


def _array(output: torch.Tensor) -> Any:
    """As numpy, which has no bfloat16 and no fp8."""
    output = output.detach()
    return (output.float() if output.dtype in _NOT_IN_NUMPY else output).cpu().numpy()


def open_exported(file: Path, settings: Predict) -> TorchModel:
    """A file of torch.export."""
    program = load_program(file)
    schema, device = _exported_schema(program), _device(settings)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module()
    called: Any = torch.compile(module, dynamic=schema.fixed_rows is None) if settings.compile else module
    spec = program.call_spec.in_spec

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = pytree.tree_unflatten(list(tensors), spec)
        return _tensors(called(*args, **kwargs))

    return TorchModel(call, schema, settings)


def _exported_schema(program: torch.export.ExportedProgram) -> Schema:
    """Inputs and outputs as traced; the first dimension counts rows where it is the same free dimension everywhere."""
    nodes = {node.name: node for node in program.graph.nodes}
    ins = [nodes[name] for name in program.graph_signature.user_inputs if isinstance(name, str)]
    if len(ins) != len(program.graph_signature.user_inputs):
        raise BadModel("its inputs are not all tensors; export a module that takes tensors only")
    outs = [nodes[name] for name in program.graph_signature.user_outputs if isinstance(name, str) and name in nodes]
    inputs = tuple(_exported_field(node.name, node) for node in ins)
    names = _output_names(program, len(outs))
    outputs = tuple(_exported_field(name, node) for name, node in zip(names, outs, strict=True))
    firsts = {str(node.meta["val"].shape[0]) if node.meta["val"].ndim else "" for node in (*ins, *outs)}
    if len(firsts) == 1 and all(field.shape and field.shape[0] is None for field in inputs):
        return Schema(inputs=inputs, outputs=outputs, batched=True, max_rows=_max_rows(program, ins[0]))
    return fixed_schema(inputs, outputs)


def _exported_field(name: str, node: torch.fx.Node) -> Field:
    value = node.meta["val"]
    shape: Shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Field(name=name, dtype=_dtype_name(value), shape=shape)


def _max_rows(program: torch.export.ExportedProgram, node: torch.fx.Node) -> int | None:
    """The largest number of rows that the file was exported for."""
    bounds = program.range_constraints.get(node.meta["val"].shape[0].node.expr)
    return int(bounds.upper) if bounds is not None and bounds.upper < 2**31 else None


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Keys of a dict output, `output` for a single tensor, else output_0 …"""
    keys = getattr(program.call_spec.out_spec, "context", None)
    if count == 1:
        return ["output"]
    if isinstance(keys, list) and len(keys) == count and all(isinstance(key, str) for key in keys):
        return list(keys)
    return [f"output_{i}" for i in range(count)]


def open_torchscript(file: Path, settings: Predict) -> TorchModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; files of it are not
        try:
            loaded = torch.jit.load(str(file), map_location=_device(settings))
        except RuntimeError as error:
            if "constants.pkl" in str(error) or "PytorchStreamReader" in str(error):
                raise BadModel(
                    f"{file} is not TorchScript (weights alone, or a pickled module); export the module "
                    "with armillary convert FILE.py:NAME model.pt2 --to pt2"
                ) from None
            raise
        module = torch.jit.freeze(loaded.eval())
    schema = Schema(
        inputs=_script_inputs(module), outputs=(Field(name="output", dtype="float32", shape=None),), batched=True
    )

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = _tensors(module(*tensors))
        if len(outputs) != 1:
            raise BadModel(f"{file} returns {len(outputs)} tensors; export it with armillary convert --to pt2")
        return outputs

    return TorchModel(call, schema, settings)


def _script_inputs(module: Any) -> tuple[Field, ...]:
    values = list(module.graph.inputs())[1:]  # the first is the module
    if not values:
        raise BadModel("it takes no tensor; export a module that takes one")
    return tuple(_script_field(value) for value in values)


def _script_field(value: Any) -> Field:
    """Dtype and shape of an input, from the first operation that reads it."""
    name = value.debugName().split(".")[0]
    for use in value.uses():
        operation, inputs = use.user, list(use.user.inputs())
        weights = [node.toIValue() for node in inputs if isinstance(node.toIValue(), torch.Tensor)]
        dtype = _dtype_name(weights[0]) if weights else "float32"
        shape = _script_shape(operation.kind(), weights, inputs)
        if operation.kind() == "aten::embedding":
            return Field(name=name, dtype="int64", shape=shape)
        if shape is not None:
            return Field(name=name, dtype=dtype, shape=shape)
    return Field(name=name, dtype="float32", shape=None)


def _script_shape(kind: str, weights: list[torch.Tensor], inputs: list[Any]) -> Shape | None:
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


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
