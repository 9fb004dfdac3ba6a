"""C++ kernels over packed weights: the reference with the same rounded inputs, for every format."""

import shutil
from dataclasses import replace

import pytest
import torch

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.native import token_kernels
from armillary.kernels.native.library import build, library
from armillary.kernels.native.packed_weight import (
    Codes,
    PackedWeight,
    dequantised,
    pack_codes,
    reference,
    refuses,
    rounded,
    unpack_codes,
)

N, K = 48, 512
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


def some_codes() -> dict[str, Codes]:
    generator = torch.Generator().manual_seed(0)

    def whole(columns: int, most: int) -> torch.Tensor:
        return torch.randint(0, most, (N, columns), generator=generator, dtype=torch.uint8)

    def scale(columns: int) -> torch.Tensor:
        return torch.rand(N, columns, generator=generator) + 0.1

    halves = {"super_NS": scale(2).half(), "super_minimum_NS": scale(2).half()}
    minima = {"scale_NG": whole(16, 64), "minimum_NG": whole(16, 64), "inputs": "super", **halves}
    chunks = {"group": 32, "inputs": "half chunk"}
    row = {"codes_NK": whole(K, 256), "bits": 8, "group": K, "scale_NG": scale(1), "zero": 128}
    return {
        "Q8_0": Codes(codes_NK=whole(K, 256), bits=8, scale_NG=scale(16).half(), zero=128, **chunks),
        "int8": Codes(**row),
        "W8A8": Codes(**row, inputs="token"),
        "Q4_0": Codes(codes_NK=whole(K, 16), bits=4, scale_NG=scale(16).half(), zero=8, **chunks),
        "int4": Codes(codes_NK=whole(K, 16), bits=4, group=128, scale_NG=scale(4).bfloat16(), zero=8),
        "zeros": Codes(codes_NK=whole(K, 16), bits=4, group=64, scale_NG=scale(8).half(), zero=8, zero_NG=whole(8, 16)),
        "Q4_K": Codes(codes_NK=whole(K, 16), bits=4, group=32, **minima),
        "Q5_K": Codes(codes_NK=whole(K, 32), bits=5, group=32, **minima),
        "Q6_K": Codes(
            codes_NK=whole(K, 64), bits=6, group=16, scale_NG=whole(32, 256).view(torch.int8),
            super_NS=halves["super_NS"], zero=32, inputs="super",
        ),
        "MXFP4": Codes(codes_NK=whole(K, 16), bits=4, group=32, scale_NG=whole(16, 9) + 120, fp4="e8m0"),
        "NVFP4": Codes(
            codes_NK=whole(K, 16), bits=4, group=16, scale_NG=whole(32, 127), fp4="e4m3", super_NS=scale(1)
        ),
        "8 bits with zeros": Codes(
            codes_NK=whole(K, 256), bits=8, group=64, scale_NG=scale(8).half(), zero_NG=whole(8, 256)
        ),
        "W8A8, odd": Codes(
            codes_NK=whole(K - 32, 256), bits=8, group=K - 32, scale_NG=scale(1), zero=128, inputs="token"
        ),
    }  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", list(some_codes()))
def test_the_kernel_is_the_reference(name: str) -> None:
    codes = some_codes()[name]
    weight, bias = PackedWeight.of([codes]), torch.randn(N)
    for tokens in (1, 3, 4, 12, 29, 150):  # matrix units take 16 at a time, and four times as many together
        x = torch.randn(tokens, codes.codes_NK.shape[1], generator=torch.Generator().manual_seed(tokens)) * 3
        assert relative_error(weight(x), reference(x, codes)) < 1e-5
        assert torch.allclose(weight(x, bias) - bias, weight(x), rtol=1e-4, atol=1e-3)
        assert relative_error(reference(x, codes), x @ dequantised(codes).t()) < 2e-2


@needs_compiler
def test_rows_are_selected_and_outputs_ordered() -> None:
    torch.manual_seed(0)
    for codes in some_codes().values():
        order = torch.randperm(N)
        weight, x = PackedWeight.of([codes], order), torch.randn(20, codes.codes_NK.shape[1])
        assert torch.equal(weight.select(torch.tensor([3, 40, 3])), dequantised(codes)[[3, 40, 3]])
        assert relative_error(weight(x)[:, order], reference(x, codes)) < 1e-5


@needs_compiler
def test_halves_of_rows_are_rounded_by_the_whole_row() -> None:
    """Inputs with a scale per token that ranks divide: the sum of both halves is the whole."""
    torch.manual_seed(0)
    codes, x = some_codes()["W8A8"], torch.randn(5, K) * torch.linspace(0.1, 3, K)
    halves = [
        replace(codes, codes_NK=codes.codes_NK[:, part], group=K // 2) for part in (slice(K // 2), slice(K // 2, K))
    ]
    sums, apart = torch.zeros(2, 5, N), torch.zeros(2, 5, N)
    for rank, (half, inputs) in enumerate(zip(halves, x.chunk(2, dim=1), strict=True)):
        weight = PackedWeight.of([half])
        weight.into(inputs.contiguous(), sums[rank], most_M=x.abs().amax(-1))
        weight.into(inputs.contiguous(), apart[rank])
    whole = PackedWeight.of([codes])(x)
    assert relative_error(sums.sum(0), whole) < 1e-6
    assert relative_error(apart.sum(0), whole) > 1e-4


@needs_compiler
def test_large_and_empty_numbers() -> None:
    """The largest codes do not overflow; a row of zeros has no scale."""
    codes = Codes(
        codes_NK=torch.full((16, 65536), 255, dtype=torch.uint8), bits=8, group=65536, scale_NG=torch.ones(16, 1),
        zero=128, inputs="token",
    )  # fmt: skip
    weight = PackedWeight.of([codes])
    assert weight(torch.ones(1, 65536))[0, 0] == pytest.approx(127 * 65536, rel=1e-6)
    assert not weight(torch.zeros(5, 65536)).any()


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_codes_are_unpacked_as_they_were(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (32, 96), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.numel() == codes.numel() * bits // 8
    assert torch.equal(unpack_codes(packed, bits).flatten(0, 1), codes)


def test_inputs_are_rounded_to_127_steps() -> None:
    x = torch.randn(3, 512)
    for inputs in ("chunk", "half chunk", "super", "token"):
        widest, errors = x.abs().amax(dim=1) / 127, (rounded(x, inputs) - x).abs().amax(dim=1)
        assert (errors <= widest * (0.55 if "half" in inputs else 0.5005)).all()


def test_what_no_kernel_takes_is_refused() -> None:
    def codes(rows: int, columns: int, group: int, **others: object) -> Codes:
        scale = torch.ones(rows, columns // group)
        return Codes(
            codes_NK=torch.zeros(rows, columns, dtype=torch.uint8), bits=8, group=group, scale_NG=scale, **others
        )

    assert refuses(codes(16, 64, 64)) is None
    assert "sixteens" in str(refuses(codes(20, 64, 64))) and "32s" in str(refuses(codes(16, 48, 48)))
    assert "groups of 16" in str(refuses(codes(16, 64, 16)))
    assert "per token" in str(refuses(codes(16, 64, 32, inputs="token")))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("march", ["skylake-avx512", "haswell", "x86-64"])
def test_other_instruction_sets_agree(march: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without VNNI: AVX2 for two of them, plain C++ for the last."""
    import armillary.kernels.native.packed_weight as module
    from armillary.kernels.native.library import load

    kernels = load(build(tmp_path, march=march))
    assert kernels.armillary_units() in (b"AVX2", b"plain C++")
    monkeypatch.setattr(module, "library", lambda: kernels)
    torch.manual_seed(0)
    for codes in some_codes().values():
        weight, x = PackedWeight.of([codes]), torch.randn(17, codes.codes_NK.shape[1])
        assert relative_error(weight(x), reference(x, codes)) < 1e-5
    monkeypatch.setattr(token_kernels, "library", lambda: kernels)
    token_kernels.agree.cache_clear()
    assert token_kernels.agree()
    token_kernels.agree.cache_clear()


def test_without_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert library() is None and "no C++ compiler" in caplog.text
    library.cache_clear()
