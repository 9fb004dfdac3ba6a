"""Absorbed latent attention: the kernels against the plain reference, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from armillary.kernels.latent.latent_decode import LATENT_DECODE, LatentCase, latent_decode
from tests.kernels.agreeing import assert_agrees
from tests.kernels.interpreter import needs_interpreter
from tests.kernels.latent.latent_batches import Shape, batch
from tests.kernels.pages import error, wide


def fast():  # type: ignore[no-untyped-def]
    return LATENT_DECODE.version("triton").load()  # type: ignore[union-attr]


SHAPES = {
    "rows without queries, rows without keys, padding": Shape(queries=[1, 0, 1, 1], lengths=[70, 9, 0, 33], padding=2),
    "several queries per row, some in one tile": Shape(queries=[5, 1], lengths=[40, 37], heads=5, page=24),
    "several tiles per query, sizes that are no powers of two": Shape(
        queries=[1, 2], lengths=[50, 2], heads=40, rank=48, rope_dim=24, page=64
    ),
}


@needs_interpreter
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_agrees(name: str) -> None:
    made = batch(SHAPES[name])
    right = latent_decode(*wide(made.decode()))
    assert error(fast()(*made.decode()), right) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_need_not_be_positive(scale: float) -> None:
    *inputs, _ = batch(Shape(queries=[1], lengths=[20], heads=1)).decode()
    assert error(fast()(*inputs, scale), latent_decode(*wide((*inputs, scale)))) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_agrees(dtype: str) -> None:
    case = LatentCase(batch=2, context=40, heads=3, rank=32, rope_dim=16, ragged=True, dtype=dtype, device="cpu")
    assert_agrees(LATENT_DECODE, case)


@needs_interpreter
def test_pages_may_be_apart() -> None:
    """Pages of several layers may be adjacent, so that those of one are not."""
    made = batch(Shape(queries=[1, 1], lengths=[20, 33], heads=2))
    both = torch.stack((made.cache, torch.full_like(made.cache, torch.nan)), dim=1)
    q_TNC, q_TNR, cache, rows, scale = made.decode()
    assert torch.equal(fast()(q_TNC, q_TNR, both[:, 0], rows, scale), fast()(q_TNC, q_TNR, cache, rows, scale))


@needs_interpreter
def test_splits_follow_the_lengths() -> None:
    """One long and several short sequences over many workers: each works on as many tiles, or none."""
    from armillary.kernels.latent import decode_wgmma

    starts, lengths = torch.arange(6, dtype=torch.int32), torch.tensor([4000, 64, 1, 0, 70], dtype=torch.int32)
    planned, shared = torch.zeros(8, 6, dtype=torch.int32), torch.ones(8, 5, dtype=torch.int32)
    decode_wgmma.plan[(8,)](starts, lengths, planned, shared, 5, 8, N=64, QUERIES=1, ROWS=32, PLANNED=6)
    tiles = [63, 1, 1, 1, 2]  # ⌈length / 64⌉, at least one
    assert planned[:, 0].tolist() == [9] * 8  # ⌈68 / 8⌉
    assert [stop - begin for _, begin, stop, *_ in planned.tolist()] == [9] * 7 + [5]
    assert planned[-1].tolist() == [9, 63, 68, 1, 0, 4]
    assert sum(tiles) == 68 and not shared[:, 0].any()
