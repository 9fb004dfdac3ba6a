"""Norm, rotation and cache write of latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from armillary.kernels.latent.latent_to_cache import latent_to_cache
from tests.kernels.pages import error


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
