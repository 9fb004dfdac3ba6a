"""Packed experts as numbers: by the kernel for many tokens as by plain torch, and as the definition of their format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.kernels.moe.moe import GROUPED_MOE, SMALL_MOE, MoECase
from armillary.kernels.moe.packed_stack import DEQUANTISE_STACK, PackedStack, StackCase, random_stack, rows_bytes
from armillary.kernels.quantized.weight_only import WeightFormat, dequantised, nibbles, to_words
from tests.kernels.agreeing import assert_agrees
from tests.kernels.interpreter import needs_interpreter

FORMATS = {
    "mxfp4": WeightFormat("mxfp4", 32),
    "nvfp4": WeightFormat("nvfp4", 16),
    "int4": WeightFormat("int4", 64),
    "int4 with zeros": WeightFormat("int4", 96, zeros=True),
    "int8": WeightFormat("int8", 0),
    "fp8 blocks": WeightFormat("fp8", 128),
}


@needs_interpreter
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_agrees(name: str) -> None:
    kind, group, zeros = FORMATS[name]
    shape = {"experts": 3, "rows": 6, "columns": 544}  # two programs of columns, the second not full
    assert_agrees(DEQUANTISE_STACK, StackCase(kind=kind, group=group, zeros=zeros, dtype="fp32", device="cpu", **shape))


@pytest.mark.parametrize("name", FORMATS)
def test_stacks_hold_the_numbers_of_weights(name: str) -> None:
    """Codes in their own order and in words are the same weight."""
    format = FORMATS[name]
    stack = random_stack(format, (2, 4, 128), torch.Generator().manual_seed(1))
    codes = stack.codes_ENB.flatten(0, 1)
    words = codes if format.kind in ("int8", "fp8") else to_words(nibbles(codes))
    zero = None if stack.zero_ENG is None else stack.zero_ENG.flatten(0, 1)
    wanted = dequantised(words, stack.scale_ENG.flatten(0, 1), zero, format.kind, stack.group).view(2, 4, 128)
    assert stack.shape == (2, 4, 128)
    assert torch.equal(stack.select(torch.tensor([1, 0]), torch.float32), wanted.flip(0))


def test_bytes_of_a_weight() -> None:
    stack = random_stack(WeightFormat("int4", 32, zeros=True), (2, 4, 64), torch.Generator().manual_seed(1))
    assert stack.itemsize * 4 * 64 == rows_bytes(stack.format, 4, 64) == 4 * (32 + 2 * 2 + 2)
    assert isinstance(stack.contiguous(), PackedStack)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_layers_on_a_gpu(name: str, dtype: str) -> None:
    """By codes for a few tokens, in tiles for some, and dequantised first."""
    kind, group, zeros = FORMATS[name]
    case = MoECase(
        tokens=1, hidden=384, ffn=192, experts=8, top_k=2, packed=kind, group=group, zeros=zeros, dtype=dtype
    )
    assert_agrees(DEQUANTISE_STACK, StackCase(experts=4, rows=96, columns=384, kind=kind, group=group, zeros=zeros))
    for tokens in (1, 5):
        assert_agrees(SMALL_MOE, replace(case, tokens=tokens))
    for tokens in (9, 70, 700, 2000):
        assert_agrees(GROUPED_MOE, replace(case, tokens=tokens))
