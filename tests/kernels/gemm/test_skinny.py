"""Small matmuls: any number of tokens up to 64, any size, with norm, SwiGLU and residual fused or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.core.agreement import check, expect, relative_error
from armillary.kernels.gemm.skinny import SMALL_LINEAR, SmallLinearCase, reference, refuses
from tests.kernels.interpreter import needs_interpreter

# a GPU that is new to the thread of a backward: torch sets it up and says so
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning", "ignore:All-NaN:RuntimeWarning")


def random(m: int, n: int, k: int, *, norm: bool, gated: bool, residual: bool, dtype: torch.dtype = torch.float32):
    torch.manual_seed(m * 7 + n * 3 + k)
    n += n % 2 if gated else 0
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)
    width = n // 2 if gated else n
    return (
        x,
        weight,
        torch.randn(k).to(dtype) if norm else None,
        torch.randn(m, width).to(dtype) if residual else None,
        1e-6,
        gated,
    )


def assert_agrees(run, inputs) -> None:
    device = inputs[0].device
    found = check(run, SMALL_LINEAR, expect(SMALL_LINEAR, inputs, torch.Generator(device).manual_seed(5)))
    assert found.agreed, found.why_not


@needs_interpreter
@settings(max_examples=7, deadline=None, derandomize=True)
@given(
    st.integers(0, 70),
    st.integers(1, 150),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
)
def test_any_shape(m: int, n: int, k: int, norm: bool, gated: bool, residual: bool, splits: int) -> None:
    from armillary.kernels.gemm.skinny_triton import SkinnyTiles, run_tiles, small_linear

    inputs = random(m, n, k, norm=norm, gated=gated, residual=residual)
    assert_agrees(small_linear, inputs)
    if 0 < m <= 64:  # the inner dim split further than the plan would
        tiles = SkinnyTiles(rows=64, depth=32, splits=splits, stages=2)
        assert_agrees(lambda *arguments: run_tiles(*arguments, tiles), inputs)


@needs_interpreter
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 300), (40, 1024), (6, 1500)])
@pytest.mark.parametrize("fused", [False, True])
def test_one_token(n: int, k: int, fused: bool) -> None:
    from armillary.kernels.gemm.gemv_triton import GemvTiles, run_vector

    inputs = random(1, n, k, norm=fused, gated=fused, residual=fused)
    for rows, depth in ((4, 256), (2, 64), (2, 2048)):
        tiles = GemvTiles(rows=rows, depth=depth, warps=2, early=True)
        assert_agrees(lambda *arguments, tiles=tiles: run_vector(*arguments, tiles), inputs)


@needs_interpreter
@pytest.mark.parametrize(("m", "splits"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_bias_is_added_before_gate_and_residual(m: int, splits: int, gated: bool) -> None:
    from armillary.kernels.gemm.gemv_triton import GemvTiles, run_vector
    from armillary.kernels.gemm.skinny_triton import SkinnyTiles, run_tiles, small_linear

    inputs = (*random(m, 70, 300, norm=True, gated=gated, residual=True), torch.randn(70, 2)[:, 0])
    assert_agrees(small_linear, inputs)
    tiles = SkinnyTiles(rows=64, depth=32, splits=splits, stages=2)
    assert_agrees(lambda *given: run_tiles(*given[:6], tiles, given[6]), inputs)
    if m == 1:
        assert_agrees(lambda *given: run_vector(*given[:6], GemvTiles(4, 256, 2), given[6]), inputs)


@needs_interpreter
def test_short_rows_are_loaded_whole_and_few_rows_are_split() -> None:
    from armillary.kernels.gemm.gemv_triton import vector_plan

    assert vector_plan(256, 4096) is None
    short, long = vector_plan(6144, 4000), vector_plan(4096, 14336)
    assert short is not None and long is not None
    assert short.depth == 4096 and long.depth < 14336


@needs_interpreter
def test_a_norm_and_a_residual_that_lie_apart() -> None:
    from armillary.kernels.gemm.skinny_triton import small_linear

    x, weight, norm, residual, *rest = random(3, 40, 64, norm=True, gated=False, residual=True)
    norm, residual = torch.stack((norm, norm), 1)[:, 0], torch.stack((residual, residual), 2)[..., 0]
    assert norm.stride(0) == 2 and residual.stride(1) == 2
    assert_agrees(small_linear, (x, weight, norm, residual, *rest))


@needs_interpreter
@given(st.integers(1, 64), st.integers(1, 300_000), st.integers(1, 40_000), st.sampled_from([2, 4]))
def test_any_plan_fits_a_multiprocessor(tokens: int, outputs: int, inputs: int, itemsize: int) -> None:
    from armillary.kernels.gemm.skinny_triton import plan

    tiles = plan(tokens, outputs, inputs, itemsize)
    width = max(16, 1 << (tokens - 1).bit_length())
    assert tiles.stages >= 2 and tiles.stages * tiles.depth * itemsize * (tiles.rows + width) <= 227 << 10
    programs = -(-outputs // tiles.rows) * tiles.splits
    assert tiles.splits == 1 or (programs <= 132 and inputs // tiles.splits >= 512)


@needs_interpreter
def test_leading_dims_stay() -> None:
    from armillary.kernels.gemm.skinny_triton import small_linear

    x, weight = torch.randn(2, 3, 32), torch.randn(24, 32)
    torch.testing.assert_close(small_linear(x, weight), reference(x, weight))


@needs_interpreter
def test_nan_stays_in_its_row() -> None:
    from armillary.kernels.gemm.skinny_triton import small_linear

    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    x[1, 5] = torch.nan
    y = small_linear(x, weight, torch.ones(64))
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


@needs_interpreter
def test_the_op_can_be_traced() -> None:
    from armillary.kernels.gemm.skinny_triton import _op

    inputs = random(3, 8, 16, norm=True, gated=True, residual=True)
    torch.library.opcheck(_op, inputs, test_utils=("test_schema", "test_faketensor"))


def test_more_tokens_are_refused_by_name() -> None:
    assert "64 tokens" in str(refuses(SmallLinearCase(tokens=65, outputs=128, inputs=128)))
    assert refuses(SmallLinearCase(tokens=64, outputs=127, inputs=3)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 4096, 4096),
        (1, 1002, 333),
        (1, 4096, 14336),
        (1, 6144, 512),
        (8, 14336, 4096),
        (33, 4096, 14336),
        (5, 1002, 333),
    ],
)
def test_on_a_gpu(dtype: torch.dtype, fused: bool, m: int, n: int, k: int) -> None:
    from armillary.kernels.gemm.skinny_triton import small_linear

    inputs = random(m, n, k, norm=fused, gated=fused, residual=fused, dtype=dtype)
    inputs = tuple(x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs)
    assert_agrees(small_linear, inputs)
    first = small_linear(*inputs)
    assert all(torch.equal(first, small_linear(*inputs)) for _ in range(3)), "the same bits every time"


@pytest.mark.gpu
def test_it_can_be_captured() -> None:
    from armillary.kernels.gemm.skinny_triton import small_linear

    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((8, 4096), (4096, 4096)))
    small_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = small_linear(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative_error(y, reference(x.float(), weight.float())) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_an_early_start_never_reads_what_is_not_there_yet(tokens: int) -> None:
    """A chain of layers in a graph, each waiting for the one ahead, against the same without early starts."""
    from armillary.kernels.gemm.gemv_triton import GemvTiles, run_vector
    from armillary.kernels.gemm.skinny_triton import plan, run_tiles

    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(16)]
    first, norm = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16), torch.ones(2048, device="cuda")
    ends = []
    for early in (False, True):
        tiles, vector = replace(plan(8, 2048, 2048), early=early), GemvTiles(rows=2, depth=1024, warps=4, early=early)
        assert tiles.splits > 1

        def run(*inputs, tiles=tiles, vector=vector) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return run_vector(*inputs, vector) if tokens == 1 else run_tiles(*inputs, tiles)

        def chain(run=run) -> torch.Tensor:  # type: ignore[no-untyped-def]
            x = first
            for number, weight in enumerate(weights):
                x = run(x, weight, norm.to(x.dtype) if number % 2 else None, x, 1e-6, False)
            return x

        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            end = chain()
        for _ in range(30):
            end.zero_()
            graph.replay()
            ends.append(end.clone())
    assert all(torch.equal(end, ends[0]) for end in ends)
