"""Linear layers over packed weights: every format, one token and a few, against the torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.quantized.weight_only import (
    K_QUANTS,
    WeightOnlyCase,
    dequantised,
    from_words,
    inputs,
    reference,
    refuses,
    to_words,
    unsupported,
)
from tests.kernels.interpreter import needs_interpreter

FORMATS = [
    ("int4", 128, False),
    ("int4", 64, True),
    ("int4", 384, True),
    ("mxfp4", 32, False),
    ("nvfp4", 16, False),
    ("int8", 384, False),
    ("int8", 128, True),
    ("fp8", 384, False),
    ("fp8", 128, False),
    ("table", 64, False),
    ("q4_k", 32, False),
    ("q5_k", 32, False),
    ("q6_k", 16, False),
]


def drawn(kind: Any, group: int, zeros: bool, tokens: int, **options: Any) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Arguments, and the result in fp64."""
    sizes = {"outputs": 20, "inputs": 512 if kind in K_QUANTS else 384, "device": "cpu"} | options
    case = WeightOnlyCase(tokens=tokens, kind=kind, group=group, zeros=zeros, **sizes)
    assert refuses(case) is None
    arguments = inputs(case, torch.Generator(case.device).manual_seed(tokens))
    wide = (x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments)
    return arguments, reference(*wide)  # type: ignore[arg-type]


def test_words_hold_every_code_once() -> None:
    codes = torch.randint(0, 16, (5, 256), dtype=torch.uint8)
    words = to_words(codes)
    assert words.dtype == torch.int32 and words.shape == (5, 32) and words.nbytes == codes.numel() // 2
    assert torch.equal(from_words(words), codes)
    one = torch.zeros(1, 128, dtype=torch.uint8)
    one[0, 32 * 2 + 2 * 5 + 1] = 9  # j = 2, word 5, h = 1: nibble 2 + 4
    assert to_words(one)[0, 5].item() == 9 << 24


@needs_interpreter
@pytest.mark.parametrize(("kind", "group", "zeros"), FORMATS)
def test_one_token(kind: str, group: int, zeros: bool) -> None:
    from armillary.kernels.quantized.packed_gemv_triton import PackedGemvTiles, run_gemv

    dtype = "fp16" if zeros else "bf16"
    (x, *rest), wanted = drawn(kind, group, zeros, 1, dtype=dtype)
    depth = 256 if group < 384 else 512  # two steps, or one
    assert relative_error(run_gemv(x[0], *rest, PackedGemvTiles(rows=16, depth=depth, warps=1)), wanted[0]) < 4e-3


@needs_interpreter
@pytest.mark.parametrize("inside", [True, False], ids=["norm inside", "norm before"])
@pytest.mark.parametrize(
    ("kind", "group", "outputs"), [("int4", 128, 20), ("mxfp4", 32, 21), ("int8", 384, 20), ("fp8", 128, 21)]
)
def test_one_token_with_norm_gate_bias_and_residual(kind: str, group: int, outputs: int, inside: bool) -> None:
    from armillary.kernels.quantized.packed_gemv_triton import PackedGemvTiles, run_gemv

    arguments, wanted = drawn(kind, group, False, 1, outputs=outputs, fused=True)
    (x, *packed), around = arguments[:6], arguments[6:]
    tiles = PackedGemvTiles(rows=16, depth=256, warps=1, norm_inside=inside)
    assert wanted.shape == (1, 10 if outputs == 20 else 21)
    assert relative_error(run_gemv(x[0], *packed, tiles, *around), wanted[0]) < 6e-3


@needs_interpreter
def test_several_tokens_with_norm_gate_bias_and_residual() -> None:
    from armillary.kernels.quantized.weight_only_triton import weight_only_linear

    for tokens in (3, 70):
        arguments, wanted = drawn("int4", 128, False, tokens, fused=True)
        assert relative_error(weight_only_linear(*arguments), wanted) < 6e-3


@needs_interpreter
@pytest.mark.parametrize(("kind", "group", "zeros"), FORMATS)
def test_a_few_tokens(kind: str, group: int, zeros: bool) -> None:
    from armillary.kernels.quantized.skinny_packed_triton import PackedSkinnyTiles, run_skinny

    arguments, wanted = drawn(kind, group, zeros, 3, dtype="bf16" if zeros else "fp16")
    result = run_skinny(*arguments, PackedSkinnyTiles(rows=32, splits=2 if zeros else 1))
    assert relative_error(result, wanted) < 4e-3


@needs_interpreter
@pytest.mark.parametrize(("kind", "group", "zeros"), FORMATS)
def test_many_tokens_meet_the_weight_of_the_reference(kind: Any, group: int, zeros: bool) -> None:
    from armillary.kernels.quantized.dequantise_triton import dequantise

    (_, codes, scale, zero, *_), _ = drawn(kind, group, zeros, 1)
    wanted = dequantised(codes, scale, zero, kind, group)
    made = dequantise(codes, scale, zero, kind, group, wanted.shape[1], torch.float32)
    assert relative_error(made, wanted.double()) < 1e-6


@needs_interpreter
def test_other_shapes_go_to_the_reference() -> None:
    from armillary.kernels.quantized.weight_only_triton import weight_only_linear

    (x, *rest), wanted = drawn("int8", 128, True, 2)
    with torch.no_grad():
        result = weight_only_linear(x.float().view(2, 1, -1), *rest)
    assert result.shape == (2, 1, 20) and relative_error(result[:, 0], wanted) < 1e-5
    assert weight_only_linear(x[:0], *rest).shape == (0, 20)


def test_what_is_refused_says_why() -> None:
    assert "128 columns" in str(unsupported("int4", 128, 4000))
    assert "groups of 96" in str(unsupported("int4", 96, 4096))
    assert "groups of 16" in str(unsupported("int4", 16, 4096)) and unsupported("nvfp4", 16, 4096) is None
    assert "16 bits" in str(refuses(WeightOnlyCase(tokens=1, outputs=128, inputs=128, dtype="fp32")))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 100])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 4096), (1000, 14336), (37, 384)])
@pytest.mark.parametrize(("kind", "group", "zeros"), FORMATS)
def test_on_a_gpu(kind: str, group: int, zeros: bool, outputs: int, width: int, tokens: int, dtype: str) -> None:
    from armillary.kernels.quantized.weight_only_triton import weight_only_linear

    group = width if group == 384 else group
    if unsupported(kind, group, width):  # type: ignore[arg-type]
        pytest.skip("rows of other widths")
    arguments, wanted = drawn(kind, group, zeros, tokens, outputs=outputs, inputs=width, dtype=dtype, device="cuda")
    with torch.no_grad():
        result = weight_only_linear(*arguments)
        assert relative_error(result, wanted) < 5e-3
        assert torch.equal(weight_only_linear(*arguments), result), "the same bits every time"
