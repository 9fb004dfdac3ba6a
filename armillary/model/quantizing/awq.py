"""AWQ: columns that see large inputs are scaled up before rounding, and what makes those inputs is scaled down.

Lin et al. 2023 (arXiv 2306.00978). The factors go into the norm or the projection before, so the model computes the
same; how far to go (`alpha`) is searched per group of layers that share an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.model.layers.attention import Attention
from armillary.model.layers.latent_attention import LatentAttention
from armillary.model.layers.norm import Norm
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.quantizing.rounding import IntGrid
from armillary.model.transformer import Block

# N rows, K columns
_ALPHAS = tuple(step / 20 for step in range(20))


@dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """What the calibration text put into a layer: XᵀX and the sum of |x| over its tokens."""

    gram_KK: Tensor
    size_K: Tensor

    def scaled(self, factors_K: Tensor) -> "InputStatistics":
        """Of inputs divided by `factors_K`."""
        gram_KK = self.gram_KK / factors_K / factors_K[:, None]
        return InputStatistics(gram_KK=gram_KK, size_K=self.size_K / factors_K)


Statistics = dict[str, InputStatistics]
"""by parameter of a block, an expert's number behind a #"""


def output_error(change_NK: Tensor, gram_KK: Tensor) -> float:
    """Squared change of the outputs, summed over the calibration inputs."""
    return float(((change_NK @ gram_KK) * change_NK).sum())


def search_factors(weights: Sequence[Tensor], inputs: Sequence[InputStatistics], grids: Sequence[IntGrid]) -> Tensor:
    """[K] by which to multiply the columns of all `weights`, which see the same kind of input: s = |x|^alpha."""
    size_K = torch.stack([each.size_K for each in inputs]).sum(0)
    if not bool(size_K.any()):
        return torch.ones_like(size_K)
    size_K = (size_K / size_K.mean()).clamp_min(1e-4)
    best, chosen = torch.inf, torch.ones_like(size_K)
    for alpha in _ALPHAS:
        factors_K = size_K**alpha
        factors_K = factors_K / (factors_K.max() * factors_K.min()).sqrt()
        error = 0.0
        for weight_NK, each, grid in zip(weights, inputs, grids, strict=True):
            rounded = grid.round(weight_NK * factors_K).dequantised().float() / factors_K
            error += output_error(rounded - weight_NK, each.gram_KK)
        if error < best:
            best, chosen = error, factors_K
    return chosen


@torch.no_grad()
def fold_factors(block: Block, statistics: Statistics, grids: dict[str, IntGrid]) -> Statistics:
    """Scale the weights of a block in place, wherever something before them can take the inverse; returns the
    statistics of the inputs as they are now. `grids` has the layers that will be rounded."""
    after = dict(statistics)
    if isinstance(block.attention, LatentAttention):
        _fold_latent(block, block.attention, after, grids)
    else:
        _fold_norm(block, after, grids, block.attention_norm, ["attention.qkv.weight"], may=not block.parallel)
        _fold_values(block, block.attention, after, grids)
    is_moe = isinstance(block.mlp, MixtureOfExperts)
    ups = [*_expert_names(block, "up_E2FH"), "mlp.shared.up.weight"] if is_moe else ["mlp.up.weight"]
    _fold_norm(block, after, grids, block.mlp_norm, ups, may=not block.parallel)
    if is_moe:
        for up, down in zip(_expert_names(block, "up_E2FH"), _expert_names(block, "down_EHF"), strict=True):
            _fold_up(block, after, grids, up, down)
    _fold_up(block, after, grids, "mlp.shared.up.weight" if is_moe else "mlp.up.weight", _down_of(is_moe))
    return after


def _down_of(is_moe: bool) -> str:
    return "mlp.shared.down.weight" if is_moe else "mlp.down.weight"


def _expert_names(block: Block, part: str) -> list[str]:
    assert isinstance(block.mlp, MixtureOfExperts)
    return [f"mlp.experts.{part}#{e}" for e in range(block.mlp.moe.num_experts)]


def weight_of(block: Block, name: str) -> Tensor:
    """[N, K] of a parameter, or of one expert's part of it."""
    name, _, expert = name.partition("#")
    parameter = block.get_parameter(name).detach()
    return parameter[int(expert)] if expert else parameter


def _search(block: Block, after: Statistics, grids: dict[str, IntGrid], names: list[str]) -> Tensor:
    return search_factors([weight_of(block, n) for n in names], [after[n] for n in names], [grids[n] for n in names])


def _fold_norm(
    block: Block, after: Statistics, grids: dict[str, IntGrid], norm: Norm | None, names: list[str], *, may: bool
) -> None:
    """Into the norm before; whatever else reads its output is scaled with it."""
    names = [name for name in names if name in after]
    if not may or norm is None or norm.weight is None or not names or any(name not in grids for name in names):
        return
    factors_K = _search(block, after, grids, names)
    if norm.plus_one:
        norm.weight.copy_((norm.weight + 1) / factors_K - 1)
    else:
        norm.weight.div_(factors_K)
    if norm.bias is not None:
        norm.bias.div_(factors_K)
    if isinstance(block.mlp, MixtureOfExperts) and norm is block.mlp_norm:
        block.mlp.router.weight.mul_(factors_K)
        if block.mlp.shared_gate is not None:
            block.mlp.shared_gate.weight.mul_(factors_K)
    for name in names:
        weight_of(block, name).mul_(factors_K)
        after[name] = after[name].scaled(factors_K)


def _fold_latent(block: Block, attention: LatentAttention, after: Statistics, grids: dict[str, IntGrid]) -> None:
    """Into the norms before latents and before what is projected from them, and the value rows of the up-projection,
    which are rounded afterwards."""
    queries = "attention.q.weight" if attention.q_norm is None else "attention.q_down.weight"
    _fold_norm(block, after, grids, block.attention_norm, [queries, "attention.kv_down.weight"], may=not block.parallel)
    if attention.q_norm is not None:
        _fold_norm(block, after, grids, attention.q_norm, ["attention.q.weight"], may=True)
    _fold_norm(block, after, grids, attention.kv_norm, ["attention.kv_up.weight"], may=True)
    name, mla = "attention.out.weight", attention.mla
    if name not in grids:
        return
    factors_K = _search(block, after, grids, [name])
    rows = attention.kv_up.weight.unflatten(0, (-1, mla.nope_dim + mla.v_dim))
    rows[:, mla.nope_dim :].div_(factors_K.view(-1, mla.v_dim, 1))
    attention.out.weight.mul_(factors_K)
    after[name] = after[name].scaled(factors_K)


def _fold_values(block: Block, attention: Attention, after: Statistics, grids: dict[str, IntGrid]) -> None:
    """Into the rows of the values; query heads that share a KV head share its factors."""
    name = "attention.out.weight"
    if name not in grids or attention.clip is not None:
        return
    factors = _search(block, after, grids, [name])
    per_head = factors.view(-1, attention.group, attention.head_dim)
    factors_kD = per_head.log().mean(1).exp()  # [KV heads, D]
    factors_K = factors_kD[:, None].expand_as(per_head).flatten()
    for parameter in (attention.qkv.weight, attention.qkv.bias):
        if parameter is not None:
            rows = parameter.view(len(factors_kD), attention.group + 2, attention.head_dim, -1)
            rows[:, -1].div_(factors_kD[..., None])
    attention.out.weight.mul_(factors_K)
    after[name] = after[name].scaled(factors_K)


def _fold_up(block: Block, after: Statistics, grids: dict[str, IntGrid], up: str, down: str) -> None:
    """Into the up rows of a gated MLP, whose outputs are multiplied into the gate's."""
    activation = getattr(block.mlp, "activation", None) or getattr(block.mlp.experts, "activation", "")
    if down not in after or down not in grids or not getattr(block.mlp, "gated", True):
        return
    if activation == "swiglu_clamped":  # adds 1 to what up gives
        return
    factors_K = _search(block, after, grids, [down])
    weight_of(block, up)[1::2].div_(factors_K[:, None])
    bias = getattr(block.mlp, "up", None)
    if bias is not None and bias.bias is not None:
        bias.bias[1::2].div_(factors_K)
    weight_of(block, down).mul_(factors_K)
    after[down] = after[down].scaled(factors_K)
