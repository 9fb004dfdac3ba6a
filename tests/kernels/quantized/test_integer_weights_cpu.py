"""int8 and int4 weights through torch's kernels for them, against plain torch."""

from __future__ import annotations

import pytest
import torch

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.quantized import integer_weights_cpu as cpu
from armillary.kernels.quantized.integer_weights_cpu import Int4Weight, Int8Weight, agrees, int4_group, reference

N, K = 128, 256
FEW_AND_MANY = (1, 2, 32, 33, 64, 65, 130)


@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_int8_gives_what_plain_torch_gives(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(N, K)
    packed = Int8Weight.rounded(weight)
    assert packed.nbytes == N * K + 4 * N
    plain = (packed.codes_NK.int() + 128).to(torch.uint8)
    for tokens in FEW_AND_MANY:
        x = torch.randn(tokens, K).to(dtype)
        y, expected = packed(x), reference(x.float(), plain, packed.scale_N[:, None], 128.0)
        assert y.dtype == dtype and relative_error(y, expected) < 1e-2
    assert packed(torch.randn(0, K)).shape == (0, N)


@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize(("rows", "group", "zeros"), [(128, 128, True), (128, 32, False), (80, 64, True)])
def test_int4_gives_what_plain_torch_gives(rows: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    """80 rows are no multiple of a tile: then the kernel of few tokens takes many, too."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (rows, K), dtype=torch.uint8)
    scale, zero = torch.rand(rows, K // group), torch.randint(0, 16, (rows, K // group)).float()
    packed = Int4Weight.of(codes, scale, zero if zeros else None, group)
    for tokens in FEW_AND_MANY:
        x = torch.randn(tokens, K).to(dtype)
        y, expected = packed(x), reference(x.float(), codes, scale, zero if zeros else 8.0)
        assert y.dtype == dtype and relative_error(y, expected) < 1e-2


def test_packing_in_blocks_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 16, (208, 64), dtype=torch.uint8)
    whole = cpu._pack(codes)
    monkeypatch.setattr(cpu, "_PACKED_NUMBERS", 1)
    assert torch.equal(cpu._pack(codes), whole)


def test_an_order_that_is_not_known_needs_no_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "tile_rows", lambda: None)
    codes, scale = torch.randint(0, 16, (64, 64), dtype=torch.uint8), torch.rand(64, 2)
    x = torch.randn(70, 64)
    assert relative_error(Int4Weight.of(codes, scale, None, 32)(x), reference(x, codes, scale, 8.0)) < 1e-2


def test_a_kernel_that_is_wrong_or_missing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.Int4Weight, "__call__", lambda self, x: x.new_zeros(len(x), len(self.packed)))
    agrees.cache_clear()
    assert not agrees(4, 64, 32, torch.float32)

    def missing(self: Int8Weight, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for this CPU")

    monkeypatch.setattr(cpu.Int8Weight, "__call__", missing)
    assert not agrees(8, 64, 64, torch.float32)
    agrees.cache_clear()


@pytest.mark.parametrize(
    ("group", "rows", "inputs", "taken"),
    [(128, 64, 256, 128), (512, 64, 1024, 256), (96, 64, 192, 32), (48, 64, 96, None), (128, 8, 128, None)],
)
def test_groups_that_the_kernel_takes(group: int, rows: int, inputs: int, taken: int | None) -> None:
    assert int4_group(group, rows, inputs) == taken
