"""Our kernels are torch operators: their schemas, empty twins and gradients are what torch expects of one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from armillary.kernels.core.op import Case, Op, find_op
from tests.kernels.agreeing import loaded
from tests.kernels.interpreter import needs_interpreter

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def small(op: Op) -> Case:
    """The op's first case with hardly any rows, on the CPU."""
    case = next(iter(op.cases.values()))
    sizes = {
        "rows": 3,
        "tokens": 3,
        "columns": 24,
        "ffn": 12,
        "vocab": 20,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "rotary_dim": 8,
    }
    mine = {field.name: sizes[field.name] for field in fields(case) if field.name in sizes}
    return replace(case, device="cpu", dtype="fp32", **mine)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "operator", "order"),
    [
        ("norm", "norm", (0, None, 1, 2, 3, True, False, False)),
        ("add_norm", "norm", (0, 1, 2, 3, 4, False, True, False)),
        ("rope", "rope", (0, 1, 2, 3, 4, 5)),
        ("activate", "activate", (0, 1, 2)),
    ],
)
def test_checked_by_torch(name: str, operator: str, order: tuple[Any, ...]) -> None:
    """`order` says which of the op's arguments the operator takes; True, False and None stand for themselves."""
    op = find_op(name)
    loaded(op)
    inputs = op.inputs(small(op), torch.Generator().manual_seed(0))
    args = tuple(inputs[i] if type(i) is int else i for i in order)
    leaves = tuple(x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)
    torch.library.opcheck(getattr(torch.ops.armillary, operator).default, leaves, test_utils=CHECKS)


@needs_interpreter
@pytest.mark.parametrize("name", ["paged_attention", "qkv_cache", "small_linear", "sample", "logprobs", "fp8_matmul"])
def test_what_serving_calls_is_one_operator_in_a_graph(name: str) -> None:
    """Without gradients the kernels are launched past the dispatcher, but not where torch traces."""
    op = find_op(name)
    case, sizes = small(op), {"batch": 2, "context": 20, "inputs": 32, "outputs": 32, "rotary": 8}
    case = replace(case, **{key: value for key, value in sizes.items() if hasattr(case, key)})
    inputs = op.inputs(case, torch.Generator().manual_seed(0))
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        run = loaded(op)
        traced = torch.compile(run, backend=look, fullgraph=True)(*inputs)
        plain = run(*inputs)
    assert any(f"armillary.{name}" in target for target in seen)
    first, second = (x[0] if isinstance(x, tuple) else x for x in (traced, plain))
    assert torch.equal(first, second)
