"""Experts over ranks: shared out whole over ep, cut inside over tp, or both, with routers and shared experts beside.

ep ranks are neighbours among those that read different rows: each holds E/ep experts, of which the other ranks' tokens
come to it (`dispatch`). Gradients of an expert are summed only over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from armillary.kernels.gemm.grouped import grouped_linear
from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.moe.sorted_dispatch import SortedDispatch, to_autocast
from armillary.parallel.collectives import Group, gather, scatter, share, summed
from armillary.parallel.expert.all_to_all import ExchangedDispatch
from armillary.parallel.local_tensors import COLUMNS, ROWS, SHARED, Cut, become, localise
from armillary.parallel.mesh import Mesh

_INNER: dict[str, tuple[Placement, Placement]] = {
    "up_E2FH": (Shard(1), Shard(1)),
    "down_EHF": (Shard(2), Shard(2)),
    "up_bias_E2F": (Shard(1), Shard(1)),
    "down_bias_EH": (Replicate(), Partial()),
}
"""how tp cuts an expert's F, as weight and as gradient"""


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def cut_experts(model: nn.Module, mesh: Mesh) -> Group | None:
    """Share the experts of every layer out over ep, and cut what is left of each over tp; gives the ranks of ep."""
    axes = [axis for axis in ("ep", "tp") if mesh.size(axis) > 1]
    if not axes:
        return None
    along = mesh.along("tp") if mesh.experts is None else mesh.experts[tuple(axes)]
    group = None if mesh.experts is None else Group.of(mesh.experts["ep"])
    for mixture in mixtures(model):
        localise(mixture.experts, along, {name: _cut(name, axes) for name in _INNER})
        mixture.experts.parts = mesh.size("tp")
        if group is not None:
            grouped = mixture.dispatch.grouped if isinstance(mixture.dispatch, SortedDispatch) else grouped_linear
            mixture.dispatch = ExchangedDispatch(group, grouped)
    return group


def _cut(name: str, axes: list[str]) -> Cut:
    weight, gradient = _INNER[name]
    by_axis = {"ep": (Shard(0), Shard(0)), "tp": (weight, gradient)}
    return Cut(tuple(by_axis[axis][0] for axis in axes), tuple(by_axis[axis][1] for axis in axes))


def cut_routing(mixture: MixtureOfExperts, mesh: DeviceMesh, group: Group, *, tokens: bool) -> None:
    """Under tp every rank routes all tokens, and makes its part of the experts' and the shared expert's sum."""
    localise(mixture.router, mesh, {"weight": SHARED, "bias": SHARED})
    if mixture.shared is not None:
        localise(mixture.shared.up, mesh, {"weight": ROWS})
        localise(mixture.shared.down, mesh, {"weight": COLUMNS})
    if mixture.shared_gate is not None:
        localise(mixture.shared_gate, mesh, {"weight": SHARED})
    mixture.copies = group.size
    seen: Any = mixture
    seen.tp, seen.cut_tokens = group, tokens
    become(mixture, _of_all_tokens)


@cache
def _of_all_tokens(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, x_BTH: Tensor) -> Tensor:
        x_BTH, group = to_autocast(x_BTH), module.tp
        if not module.cut_tokens:
            return summed(kind.forward(module, share(x_BTH, group)), group)
        return scatter(kind.forward(module, gather(x_BTH, group, dim=1)), group, dim=1)

    return type(f"AllTokens{kind.__name__}", (kind,), {"forward": forward})


def shard_experts(model: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, *, again: bool, unseen: bool) -> None:
    """ZeRO over the ranks that hold the same experts; `again` lets weights go after the forward pass. With `unseen`,
    selective recompute, inside of which they are gathered, does not see that: it is done again or not as need be."""
    if mesh.experts is None:
        return
    axes = ("expert_replicate", "expert_shard") if mesh.size("expert_replicate") > 1 else ("expert_shard",)
    for mixture in mixtures(model):
        fully_shard(mixture.experts, mesh=mesh.experts[axes], mp_policy=policy, reshard_after_forward=again)
        for hooks in (mixture.experts._forward_pre_hooks, mixture.experts._forward_hooks) if unseen else ():
            for key, hook in list(hooks.items()):
                hooks[key] = _outside(hook)


def _outside(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Without the modes through which recompute watches every operation."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return hook(*args, **kwargs)

    return run


def is_of_expert(parameter: Tensor) -> bool:
    """Whether only some ranks hold this parameter, because ep shares it out."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
