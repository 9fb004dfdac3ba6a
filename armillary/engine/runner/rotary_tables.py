"""Rotary tables of the engine: cos and sin of every position, made once, and factors of queries."""

import torch
from torch import Tensor

from armillary.model.layers.rope import RotaryTable, inverse_frequencies, query_factor

# A positions, R rotated dims / 2


def query_factors(rotary: RotaryTable, length: int) -> Tensor | None:
    """[A] in fp32: of layers without rotary positions, where the model has such a factor."""
    if not rotary.temperature[0]:
        return None
    return query_factor(torch.arange(length, device=rotary.full_R.device), *rotary.temperature)


def angle_tables(rotary: RotaryTable, length: int) -> dict[bool, tuple[Tensor, Tensor]]:
    """{False: (cos, sin) of full layers, True: of sliding layers}, each [A, R] in fp32."""
    rope, device = rotary.rope, rotary.full_R.device
    frequencies = [rotary.full_R]
    if rope.scaling == "longrope" and rotary.fixed_length is None:
        frequencies = [
            inverse_frequencies(rope, rope.theta, rotary.dim, rotary.context, at).to(device) for at in (0, 1 << 60)
        ]
    positions_1A = torch.arange(length, device=device)[None]

    def table(kinds: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
        tables = [RotaryTable.cos_sin_of(positions_1A, kind, factor) for kind in kinds]
        cos, sin = (torch.cat([pair[i][0, :, 0] for pair in tables]) for i in (0, 1))
        return cos.contiguous(), sin.contiguous()

    full = table(frequencies, rotary.factor)
    local = full if rope.local_theta is None else table([rotary.local_R] * len(frequencies), 1.0)
    return {False: full, True: local}
