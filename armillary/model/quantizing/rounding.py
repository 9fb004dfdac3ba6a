"""Weights rounded to a format: fp8 and int8 per row, int4 in groups of columns, MXFP4, the blocks of GGUF.

Every function returns `PackedRows`, so what is measured and written is what a loader makes of the bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.kernels.quantized.weight_only import FP4 as FP4_VALUES
from armillary.model.quantized.formats import Fp4, Fp8, IntGroups, pack_nibbles, spread
from armillary.model.quantized.packed_rows import PackedRows

# N rows, K columns, G groups of columns
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MXFP4_GROUP = 32
_SHRINKS = tuple(1.0 - step / 40 for step in range(17))
"""of the range of a group that are tried: 1 to 0.6; what is cut off is rounded worse, what is left better"""


@dataclass(frozen=True, kw_only=True)
class IntGrid:
    """Codes of a few bits with a scale (and zero) per row and `group` of columns."""

    bits: int
    group: int
    symmetric: bool
    scale_dtype: torch.dtype

    def fit(self, weight_NK: Tensor, importance_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(scale_NG in its dtype, zero_NG): the full range of each group, or, given how much each column matters, the
        range with the least weighted squared error."""
        grouped_NGc = self._grouped(weight_NK)
        low, high = grouped_NGc.amin(-1).clamp(max=0), grouped_NGc.amax(-1).clamp(min=0)
        if importance_K is None:
            return self._scale_and_zero(low, high)
        weighting_Gc = self._grouped(importance_K[None])[0]
        best = torch.full_like(low, torch.inf)
        scale, zero = self._scale_and_zero(low, high)
        for shrink in _SHRINKS:
            each = self._scale_and_zero(low * shrink, high * shrink)
            error = (self._rounded(grouped_NGc, *each) - grouped_NGc).square_().mul_(weighting_Gc).sum(-1)
            scale = torch.where(error < best, each[0], scale)
            zero = torch.where(error < best, each[1], zero)
            best = torch.minimum(best, error)
        return scale, zero

    def codes(self, weight_Nk: Tensor, scale_Nk: Tensor, zero_Nk: Tensor) -> Tensor:
        return (weight_Nk / scale_Nk.float()).round_().add_(zero_Nk).clamp_(0, (1 << self.bits) - 1)

    def round(self, weight_NK: Tensor, importance_K: Tensor | None = None) -> PackedRows:
        """To nearest."""
        scale_NG, zero_NG = self.fit(weight_NK, importance_K)
        columns = weight_NK.shape[1]
        codes = self.codes(weight_NK, *(spread(each, self.group, columns) for each in (scale_NG, zero_NG)))
        return self.packed(codes, scale_NG, zero_NG)

    def packed(self, codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> PackedRows:
        codes = codes_NK.to(torch.uint8)
        rows = {"codes": pack_nibbles(codes) if self.bits == 4 else codes, "scale": scale_NG}
        if not self.symmetric:
            rows["zero"] = zero_NG.to(torch.uint8)
        format = IntGroups(bits=self.bits, group=self.group, zeros=not self.symmetric, int8_activations=self.bits == 8)
        return PackedRows(format=format, rows=rows, columns=codes_NK.shape[1])

    def _grouped(self, weight_NK: Tensor) -> Tensor:
        return weight_NK.unflatten(1, (-1, self.group))

    def _scale_and_zero(self, low_NG: Tensor, high_NG: Tensor) -> tuple[Tensor, Tensor]:
        steps, middle = (1 << self.bits) - 1, 1 << (self.bits - 1)
        if not self.symmetric:
            scale = _stored((high_NG - low_NG) / steps, self.scale_dtype)
            return scale, (-low_NG / scale.float()).round().clamp(0, steps)
        # of 16 codes one more is negative: half of the steps lose little at the top and gain everywhere else
        largest = torch.maximum(high_NG, -low_NG)
        scale = _stored(largest / (steps / 2 if self.bits < 8 else middle - 1), self.scale_dtype)
        return scale, torch.full_like(low_NG, middle)

    def _rounded(self, grouped_NGc: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> Tensor:
        scale, zero = scale_NG[..., None].float(), zero_NG[..., None]
        return self.codes(grouped_NGc, scale, zero).sub_(zero).mul_(scale)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the file, never 0 there: codes are found with the scale that a loader will read."""
    return scale.clamp_min(torch.finfo(dtype).tiny).to(dtype)


def round_fp8(weight_NK: Tensor, scale_dtype: torch.dtype) -> PackedRows:
    """E4M3, a scale per row."""
    columns = weight_NK.shape[1]
    scale_N1 = _stored(weight_NK.abs().amax(1, keepdim=True) / E4M3_MAX, scale_dtype)
    codes = (weight_NK / scale_N1.float()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    return PackedRows(
        format=Fp8(group=columns, fp8_activations=True), rows={"codes": codes, "scale": scale_N1}, columns=columns
    )


def round_mxfp4(weight_NK: Tensor) -> PackedRows:
    """E2M1 with a power of two per 32: of the two powers around the largest, the one with the smaller error."""
    grouped_NGc = weight_NK.unflatten(1, (-1, MXFP4_GROUP))
    largest = grouped_NGc.abs().amax(-1).clamp_min(2.0**-120)
    exponent = (largest.log2().floor() - 2).clamp(-127, 126)
    candidates = [_e2m1(grouped_NGc, exponent + more) for more in (0, 1)]
    pick = candidates[1][1] < candidates[0][1]
    codes = torch.where(pick[..., None], candidates[1][0], candidates[0][0]).flatten(1)
    rows = {"codes": pack_nibbles(codes), "scale": (exponent + pick + 127).to(torch.uint8)}
    return PackedRows(format=Fp4(group=MXFP4_GROUP, powers=True), rows=rows, columns=weight_NK.shape[1])


def _e2m1(grouped_NGc: Tensor, exponent_NG: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, squared error per group); ties go to the even code, as in hardware."""
    scaled = torch.ldexp(grouped_NGc, -exponent_NG[..., None].int())
    values = torch.tensor(FP4_VALUES[:8], device=scaled.device)
    middles = (values[1:] + values[:-1]) / 2
    size = scaled.abs()
    below, above = (torch.bucketize(size, middles, right=right) for right in (False, True))
    code = torch.where((below != above) & (below % 2 == 1), above, below)
    error = (values[code] - size).square().sum(-1) * torch.ldexp(torch.ones_like(exponent_NG), 2 * exponent_NG.int())
    return (code + 8 * (scaled < 0)).to(torch.uint8), error


def round_inputs_fp8(x: Tensor) -> Tensor:
    """Activations per token, as servers round them at run time."""
    scale = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(1e-12)
    return (x / scale).to(E4M3).to(x.dtype) * scale


def round_inputs_int8(x: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
    return (x / scale).round().clamp(-127, 127) * scale
