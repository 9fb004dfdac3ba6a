"""fp8 GEMMs with scales per block."""

from __future__ import annotations

import pytest
import torch

from armillary.kernels.quantized.block_fp8 import BLOCK_FP8, BlockFp8Case, in_blocks, quantise_tokens, spread_blocks
from armillary.kernels.quantized.sparse import prune
from tests.kernels.agreeing import assert_agrees
from tests.kernels.interpreter import needs_interpreter


def test_scales_of_blocks_cover_their_rows_and_columns() -> None:
    scale = torch.arange(4.0).view(2, 2)
    wide = spread_blocks(scale, 200)
    assert wide.shape == (200, 256)
    assert wide[127, 127] == 0 and wide[127, 128] == 1 and wide[128, 127] == 2 and wide[199, 255] == 3


def test_scales_of_rows_that_are_alike_become_those_of_blocks() -> None:
    scale, other = torch.rand(2, 3), torch.rand(200, 2)
    rows = scale.repeat_interleave(128, 0)
    assert torch.equal(in_blocks(rows), scale) and torch.equal(in_blocks(other), other)
    rows[129] += 1
    assert torch.equal(in_blocks(rows), rows) and torch.equal(spread_blocks(rows, 256)[:, 200], rows[:, 1])


@needs_interpreter
def test_tokens_are_quantised_as_the_reference_does() -> None:
    from armillary.kernels.quantized.block_fp8_triton import quantise_tokens as launched

    x = torch.randn(5, 256)
    x[2, 128:] = 0
    (numbers, scale), (wanted, wanted_scale) = launched(x), quantise_tokens(x)
    torch.testing.assert_close(scale, wanted_scale)
    assert torch.equal(numbers.float(), wanted.float())


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "outputs", "width", "by_row"), [(3, 48, 256, False), (70, 144, 128, False), (3, 144, 256, True)]
)
def test_our_own_gemm(tokens: int, outputs: int, width: int, by_row: bool) -> None:
    case = BlockFp8Case(tokens=tokens, outputs=outputs, inputs=width, by_row=by_row, dtype="fp16", device="cpu")
    assert_agrees(BLOCK_FP8, case)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("version", ["triton", "triton+cublas"])
@pytest.mark.parametrize(("tokens", "outputs", "width"), [(256, 512, 1024), (1000, 1536, 7168), (4, 128, 128)])
def test_on_a_gpu(version: str, tokens: int, outputs: int, width: int, by_row: bool) -> None:
    assert_agrees(BLOCK_FP8, BlockFp8Case(tokens=tokens, outputs=outputs, inputs=width, by_row=by_row), version)


def test_pruning_keeps_the_two_largest_of_four() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 4.0]])
    assert prune(weight).tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0]]
    assert (prune(torch.randn(8, 64)).unflatten(1, (-1, 4)) != 0).sum(-1).eq(2).all()


@pytest.mark.gpu
def test_sparse_weights_on_a_gpu() -> None:
    from armillary.kernels.quantized.sparse import SparseLinear

    x, weight = (torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = prune(weight)
    torch.testing.assert_close(SparseLinear(weight)(x), x @ weight.t(), rtol=2e-2, atol=0.5)
