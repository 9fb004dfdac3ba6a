"""A mixture of experts as the engine runs it: by the kernels for few or many tokens, with its choices counted."""

from torch import Tensor

from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.linear.linear_fn import linear_fn, run_fused
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.moe.moe import prefers_small
from armillary.model.layers.norm import Norm
from armillary.model.moe.experts import MixtureOfExperts

# M tokens, H hidden


def run_mixture(mixture: MixtureOfExperts, x_MH: Tensor, load: ExpertLoad | None, kernels: EngineKernels) -> Tensor:
    """[M, H], the shared expert included."""
    few, many = kernels.moe, kernels.grouped_moe
    if few is None or many is None:
        return mixture(x_MH[None], load)[0]  # type: ignore[no-any-return]
    return mixture.fused(few if prefers_small(len(x_MH), mixture.weights(), mixture.moe) else many, x_MH, load)


def run_small_mixture(
    mixture: MixtureOfExperts, x_MH: Tensor, norm: Norm, load: ExpertLoad | None, kernels: EngineKernels
) -> Tensor:
    """Norm, experts and residual; the shared expert's result is added to the residual first."""
    few, many = kernels.moe, kernels.grouped_moe
    assert few is not None and many is not None
    added = x_MH
    if mixture.shared is not None:
        inner = run_fused(linear_fn(mixture.shared.up), x_MH, kernels.small, norm=norm, gated=True)
        added = run_fused(linear_fn(mixture.shared.down), inner, kernels.small, residual=x_MH)
    weights, activation = mixture.weights(), mixture.experts.activation
    if prefers_small(len(x_MH), weights, mixture.moe):
        return few(x_MH, weights, mixture.moe, activation, norm.weight, added, norm.eps, load)  # type: ignore[no-any-return]
    normed = kernels.norm(x_MH, norm.weight, norm.bias, norm.eps, norm.kind, norm.plus_one)
    return many(normed, weights, mixture.moe, activation, None, added, load=load)  # type: ignore[no-any-return]
