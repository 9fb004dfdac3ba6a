"""Norm, rotation and cache write of latents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from armillary.kernels.latent.latent_to_cache import LATENT_TO_CACHE, LatentCacheCase, latent_to_cache
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter
from tests.kernels.pages import error, wide


def test_rows_are_normed_rotated_and_put_at_their_slots() -> None:
    torch.manual_seed(0)
    kv, q, weight = torch.randn(3, 24).double(), torch.randn(3, 2, 8).double(), torch.rand(16).double()
    angles, cache = torch.randn(3, 4).double(), torch.zeros(5, 4, 24).double()
    turned_q, same = latent_to_cache(
        kv, q, cache, torch.tensor([17, -1, 2]), angles.cos(), angles.sin(), weight, 1e-6, True
    )

    def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:  # neighbours as complex numbers
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.exp(1j * angle)).flatten(-2)

    latent = F.rms_norm(kv[:, :16], (16,), weight, 1e-6)
    rows = torch.cat((latent, turned(kv[:, 16:], angles)), -1)
    assert same is cache
    assert error(turned_q, turned(q, angles[:, None])) < 1e-10
    assert error(cache.view(20, 24)[[17, 2]], rows[[0, 2]]) < 1e-10
    assert int(cache.view(20, 24).any(-1).sum()) == 2  # nothing else was written


@needs_interpreter
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_kernel_agrees(interleaved: bool) -> None:
    """Strided projections, a rank and rope dims that are no powers of two, tokens that are not written."""
    torch.manual_seed(1)
    projection, queries = torch.randn(5, 90), torch.randn(5, 3, 40)
    angles, cache = torch.randn(5, 12), torch.randn(4, 4, 72)
    call = (
        projection[:, 9:81],
        queries[..., 16:],
        cache,
        torch.tensor([3, 15, -1, 0, 8]),
        angles.cos(),
        angles.sin(),
        torch.rand(48),
        1e-5,
        interleaved,
    )
    right_q, right = latent_to_cache(*wide(call))
    q, same = loaded(LATENT_TO_CACHE)(*call)
    assert same is cache
    assert error(q, right_q) < 1e-5 and error(cache, right) < 1e-5


@needs_interpreter
def test_16_bit_agrees() -> None:
    assert_agrees(LATENT_TO_CACHE, LatentCacheCase(tokens=3, heads=5, rank=32, rope_dim=16, device="cpu"))
