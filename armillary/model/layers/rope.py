"""Rotary positions: inverse frequencies under every scaling rule, and their cos and sin tables.

Frequencies follow Su et al. 2021; linear (Chen et al. 2023), dynamic NTK, llama3 (Llama 3.1), yarn (Peng et al. 2023)
and longrope (Ding et al. 2024) stretch them. Cos and sin are computed once per forward pass, in fp32.
"""

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from armillary.spec.model import ModelConfig, Rope

# B batch, T tokens, N heads, D head dim, R rotated dims / 2


CosSin = dict[bool | None, tuple[Tensor, ...]]
"""{False: (cos, sin) of full layers, True: of sliding layers, None: (factor of queries,) of layers that rotate nothing,
where the model has one}, each [B, T, 1, R or 1]"""


class RotaryTable(nn.Module):
    """cos and sin for given positions, one pair for full layers and one for sliding layers where they differ.

    Frequencies are buffers that are recomputed in fp32 whenever the module changes device or dtype, so a forward pass
    copies nothing from the CPU. Rules that depend on the sequence length read the largest position, which waits for the
    device; `fixed_length` fixes the length, as CUDA graphs and servers need.
    """

    full_R: Tensor
    local_R: Tensor

    def __init__(self, config: ModelConfig, *, fixed_length: int | None = None) -> None:
        super().__init__()
        self.rope, self.dim, self.context = config.rope, config.rotary_dim, config.context
        self.fixed_length = fixed_length
        self.factor = attention_factor(self.rope)
        self.temperature = (config.query_temperature, config.temperature_floor)
        for name, frequencies_R in self._frequencies(fixed_length or 0).items():
            self.register_buffer(name, frequencies_R, persistent=False)

    def _frequencies(self, length: int) -> dict[str, Tensor]:
        """Frequencies of full layers, and of sliding layers where they have their own base."""
        frequencies = {"full_R": inverse_frequencies(self.rope, self.rope.theta, self.dim, self.context, length)}
        if self.rope.local_theta is not None:
            frequencies["local_R"] = inverse_frequencies(Rope(), self.rope.local_theta, self.dim, self.context, length)
        return frequencies

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, frequencies_R in self._frequencies(self.fixed_length or 0).items():
            setattr(self, name, frequencies_R.to(self.full_R.device))
        return self

    def forward(self, positions_BT: Tensor) -> CosSin:
        full = self.cos_sin_of(positions_BT, self._full(positions_BT), self.factor)
        tables: CosSin = {False: full, True: full}
        if self.rope.local_theta is not None:
            tables[True] = self.cos_sin_of(positions_BT, self.local_R, 1.0)
        if self.temperature[0]:
            tables[None] = (query_factor(positions_BT, *self.temperature)[..., None, None],)
        return tables

    def _full(self, positions_BT: Tensor) -> Tensor:
        if self.rope.scaling not in ("dynamic", "longrope") or self.fixed_length is not None:
            return self.full_R
        length = int(positions_BT.max()) + 1
        return inverse_frequencies(self.rope, self.rope.theta, self.dim, self.context, length).to(positions_BT.device)

    @staticmethod
    def cos_sin_of(positions_BT: Tensor, frequencies_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        angles = positions_BT[..., None].float() * frequencies_R
        return angles.cos()[:, :, None] * factor, angles.sin()[:, :, None] * factor


def query_factor(positions: Tensor, temperature: float, floor: int) -> Tensor:
    """Factor of the queries of layers without rotary positions, in fp32 (Llama 4)."""
    return 1.0 + temperature * torch.log1p(((positions + 1) // floor).float())


def inverse_frequencies(rope: Rope, theta: float, dim: int, context: int, length: int) -> Tensor:
    """Frequencies [dim/2] in fp32; `length` matters to dynamic and longrope only."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / theta**exponents
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "dynamic":
        return _dynamic(rope, theta, exponents, dim, context, length)
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, theta, plain, dim)
    factors = rope.long_factors if length > (rope.original_context or context) else rope.short_factors
    return plain / torch.tensor(factors, dtype=torch.float32)


def _dynamic(rope: Rope, theta: float, exponents: Tensor, dim: int, context: int, length: int) -> Tensor:
    stretch = rope.factor * max(length, context) / context - (rope.factor - 1)
    return 1.0 / (theta * stretch ** (dim / (dim - 2))) ** exponents


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    assert rope.original_context is not None
    wavelength = 2 * math.pi / plain
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > rope.original_context / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelength < rope.original_context / rope.high_freq_factor, plain, scaled)


def _yarn(rope: Rope, theta: float, plain: Tensor, dim: int) -> Tensor:
    """Dims with short wavelengths keep their frequency, those with long ones are interpolated, with a ramp between."""
    context = rope.original_context
    assert context is not None

    def dim_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def attention_factor(rope: Rope) -> float:
    """The factor of cos and sin: 1 except for yarn and longrope."""
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling == "longrope":
        assert rope.original_context is not None
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context)) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
