"""Models of torch.export (.pt2): the file states shapes, dtypes and free dimensions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from armillary.errors import BadModel
from armillary.kernels.core.torch_compat import load_program
from armillary.serving.predict.schema import Field, Schema, Shape, leading
from armillary.serving.predict.torch_model import TorchModel, device_of, dtype_name
from armillary.spec.tables.serve import Predict


def open_model(file: Path, settings: Predict) -> TorchModel:
    program = load_program(file)
    schema = schema_of(program)
    device = device_of(settings)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module()
    called: Any = torch.compile(module, dynamic=schema.fixed_rows is None) if settings.compile else module
    spec = program.call_spec.in_spec

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = pytree.tree_unflatten(list(tensors), spec)
        return [leaf for leaf in pytree.tree_leaves(called(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]

    return TorchModel(call, schema, settings)


def schema_of(program: torch.export.ExportedProgram) -> Schema:
    """Inputs and outputs as traced; the first dimension counts rows where it is the same free dimension everywhere."""
    nodes = {node.name: node for node in program.graph.nodes}
    ins = [nodes[name] for name in program.graph_signature.user_inputs if isinstance(name, str)]
    if len(ins) != len(program.graph_signature.user_inputs):
        raise BadModel("its inputs are not all tensors; export a module that takes tensors only")
    outs = [nodes[name] for name in program.graph_signature.user_outputs if isinstance(name, str) and name in nodes]
    inputs = tuple(_field(node.name, node) for node in ins)
    names = _output_names(program, len(outs))
    outputs = tuple(_field(name, node) for name, node in zip(names, outs, strict=True))
    firsts = {str(node.meta["val"].shape[0]) if node.meta["val"].ndim else "" for node in (*ins, *outs)}
    free = len(firsts) == 1 and all(field.shape and field.shape[0] is None for field in inputs)
    if free:
        return Schema(inputs=inputs, outputs=outputs, batched=True, max_rows=_max_rows(program, ins[0]))
    same, rows = leading(inputs, outputs)
    why = "" if same else "inputs and outputs have no common first dimension"
    return Schema(inputs=inputs, outputs=outputs, batched=same, fixed_rows=rows if same else None, why_not=why)


def _field(name: str, node: torch.fx.Node) -> Field:
    value = node.meta["val"]
    shape: Shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Field(name=name, dtype=dtype_name(value.dtype), shape=shape)


def _max_rows(program: torch.export.ExportedProgram, node: torch.fx.Node) -> int | None:
    """The largest number of rows that the file was exported for."""
    symbol = node.meta["val"].shape[0].node.expr
    bounds = program.range_constraints.get(symbol)
    return int(bounds.upper) if bounds is not None and bounds.upper < 2**31 else None


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Keys of a dict output, `output` for a single tensor, else output_0 …"""
    spec = program.call_spec.out_spec
    keys = getattr(spec, "context", None)
    if count == 1:
        return ["output"]
    if isinstance(keys, list) and len(keys) == count and all(isinstance(key, str) for key in keys):
        return list(keys)
    return [f"output_{i}" for i in range(count)]
