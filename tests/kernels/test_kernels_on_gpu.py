"""The memory-bound kernels on a GPU: every version agrees on random shapes, in graphs, compiled, past 2³¹ elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.core.choose_version import choose
from armillary.kernels.core.op import Case, Op
from armillary.kernels.norm.norm import ADD_NORM, NORM, NormCase
from armillary.kernels.pointwise.activation import ACTIVATE, ActivationCase
from armillary.kernels.pointwise.rope import ROPE, RopeCase
from tests.kernels.agreeing import assert_agrees, loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's compiler warns about its own code
]
DTYPES = st.sampled_from(["fp32", "bf16", "fp16"])
OFTEN = settings(max_examples=12, deadline=None)
columns = st.one_of(st.integers(8, 700), st.sampled_from([4096, 5120, 8192, 12288, 16384, 20000, 65536, 100_001]))


@given(
    st.builds(
        NormCase,
        rows=st.integers(0, 300),
        columns=columns,
        kind=st.sampled_from(["rms", "layer"]),
        weight=st.booleans(),
        bias=st.booleans(),
        plus_one=st.booleans(),
        dtype=DTYPES,
    )
)
@OFTEN
def test_norms(case: NormCase) -> None:
    assert_agrees(NORM, case)
    assert_agrees(ADD_NORM, case)


HEADS = st.sampled_from([(64, 64), (128, 64), (96, 24), (80, 80), (80, 20), (64, 16), (96, 96)])
"""head dim, and rotated dims"""


@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 8), HEADS, st.booleans(), DTYPES)
@OFTEN
def test_rope(tokens: int, kv: int, group: int, dims: tuple[int, int], interleaved: bool, dtype: str) -> None:
    case = RopeCase(
        tokens=tokens,
        heads=kv * group,
        kv_heads=kv,
        head_dim=dims[0],
        rotary_dim=dims[1],
        interleaved=interleaved,
        dtype=dtype,
    )
    assert_agrees(ROPE, case)


@given(
    st.integers(0, 40),
    st.integers(1, 3000),
    st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"]),
    st.booleans(),
    DTYPES,
)
@OFTEN
def test_activations(rows: int, ffn: int, activation: str, gated: bool, dtype: str) -> None:
    assert_agrees(ACTIVATE, ActivationCase(rows=rows, ffn=ffn, activation=activation, gated=gated, dtype=dtype))


SMALL: list[tuple[Op, Case]] = [
    (NORM, NormCase(rows=64, columns=4096)),
    (ADD_NORM, NormCase(rows=64, columns=4096, kind="layer", bias=True)),
    (ROPE, RopeCase(tokens=64, heads=8, kv_heads=2)),
    (ACTIVATE, ActivationCase(rows=64, ffn=2048)),
]
by_name = pytest.mark.parametrize(("op", "case"), SMALL, ids=[op.name for op, _ in SMALL])


@by_name
def test_inside_torch_compile(op: Op, case: Case) -> None:
    """A custom op is taken whole, forward and backward, and gives the same bits as outside."""
    run, inputs = loaded(op), op.inputs(case, torch.Generator("cuda").manual_seed(0))

    def step(*args: Any) -> list[torch.Tensor]:
        outputs = run(*args)
        return [out * 2 for out in (outputs if isinstance(outputs, tuple) else (outputs,))]

    leaf = inputs[0].detach().requires_grad_()
    plain, inside = step(leaf, *inputs[1:]), torch.compile(step, fullgraph=True)(leaf, *inputs[1:])
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    sums = [sum(out.float().sum() for out in outputs) for outputs in (plain, inside)]
    grads = [torch.autograd.grad(total, leaf)[0] for total in sums]
    torch.testing.assert_close(*grads)


@by_name
def test_in_a_cuda_graph(op: Op, case: Case) -> None:
    run, inputs = loaded(op), op.inputs(case, torch.Generator("cuda").manual_seed(0))
    with torch.no_grad():
        plain = run(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(*inputs)
        graph.replay()
    first, second = (out[0] if isinstance(out, tuple) else out for out in (plain, captured))
    assert torch.equal(first, second)


def test_more_than_two_to_the_31_elements() -> None:
    """Offsets past 2³¹: the last row is as right as the first."""
    rows, columns = 2**31 // 16384 + 3, 16384
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    for run, args in ((loaded(NORM), (None, None, 1e-6)), (loaded(ACTIVATE), ("gelu", False))):
        ends = run(x, *args)[[0, -1]]
        torch.testing.assert_close(ends, run(x[[0, -1]], *args))


def test_the_same_bits_every_time() -> None:
    """Weight gradients are summed in a fixed order."""
    case = NormCase(rows=4096, columns=4096, kind="layer", bias=True)
    x, weight, bias, *rest = NORM.inputs(case, torch.Generator("cuda").manual_seed(0))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    grads = [torch.autograd.grad(loaded(NORM)(x, weight, bias, *rest).sum(), (weight, bias)) for _ in range(3)]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


@by_name
def test_every_version_that_is_there_agrees(op: Op, case: Case) -> None:
    trials = {trial.version: trial for trial in choose(op, replace(case), budget_s=0.01).candidates}
    assert trials["triton"].agreed and trials["compile"].agreed and trials["eager"].agreed, trials
