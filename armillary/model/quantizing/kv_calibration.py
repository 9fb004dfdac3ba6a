"""Ranges of the keys and values of each layer, for a KV cache in 8 bits, and attention as over such a cache."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.paged.cache_codes import CACHE_DTYPES, largest_code, to_codes
from armillary.model.layers.attention_forms import Attend, plain

# K KV heads


@dataclass(kw_only=True)
class KvCalibration:
    """Ranges seen so far; `kind` is fp8, with one scale per layer as vLLM reads them, or int8, with one per KV head."""

    kind: str
    ranges: dict[int, Tensor] = field(default_factory=dict)  # [2, K] by layer

    @property
    def dtype(self) -> torch.dtype:
        return CACHE_DTYPES[self.kind]

    def observed(self, number: int) -> Attend:
        """Plain attention of layer `number` that widens its range; of a stage, whose layers count from 0."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            largest_2K = torch.stack([x.abs().amax(dim=(0, 1, 3)).float().cpu() for x in (k, v)])
            before = self.ranges.get(number)
            self.ranges[number] = largest_2K if before is None else torch.maximum(before, largest_2K)
            return plain(layer, q, k, v, options)

        return attend

    def rounded(self, number: int) -> Attend:
        """Attention over keys and values as the cache would hold them."""
        scales_2K = self.scales(number)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            k, v = (self._as_cached(x, scale.to(x)) for x, scale in zip((k, v), scales_2K, strict=True))
            return plain(layer, q, k, v, options)

        return attend

    def _as_cached(self, x_BTKD: Tensor, scale_K: Tensor) -> Tensor:
        return to_codes(x_BTKD, scale_K[:, None], self.dtype).to(x_BTKD.dtype) * scale_K[:, None]

    def scales(self, number: int) -> Tensor:
        """[2, K]; a head that was always zero gets a scale too."""
        range_2K = self.ranges[number]
        if self.kind == "fp8":
            range_2K = range_2K.amax(dim=1, keepdim=True).expand_as(range_2K)
        return range_2K.clamp_min(1e-6) / largest_code(self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """As checkpoints hold them, by Hugging Face name."""
        scales = {}
        for number in sorted(self.ranges):
            for letter, scale_K in zip("kv", self.scales(number), strict=True):
                stored = scale_K[:1] if self.kind == "fp8" else scale_K
                scales[f"model.layers.{number}.self_attn.{letter}_scale"] = stored.clone()
        return scales
