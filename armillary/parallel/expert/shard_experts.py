"""Expert parallelism: experts are distributed over ep, sharded inside over tp, or both; routers are replicated.

ep ranks are neighbours among those that read different rows: each holds E/ep experts, to which the other ranks send
their tokens (`all_to_all`). Gradients of an expert are reduced only over the ranks that hold the same experts.
"""

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
from armillary.parallel.expert.all_to_all import AllToAllDispatch
from armillary.parallel.local_tensors import COLUMNS, ROWS, SHARED, ShardSpec, localise, swap_class
from armillary.parallel.mesh import Mesh

_INNER: dict[str, tuple[Placement, Placement]] = {
    "up_E2FH": (Shard(1), Shard(1)),
    "down_EHF": (Shard(2), Shard(2)),
    "up_bias_E2F": (Shard(1), Shard(1)),
    "down_bias_EH": (Replicate(), Partial()),
}
"""how tp shards an expert's F, as weight and as gradient"""


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> Group | None:
    """Distribute the experts of every layer over ep, and shard each over tp; returns the group of ep."""
    axes = [axis for axis in ("ep", "tp") if mesh.size(axis) > 1]
    if not axes:
        return None
    along = mesh.along("tp") if mesh.experts is None else mesh.experts[tuple(axes)]
    group = None if mesh.experts is None else Group.of(mesh.experts["ep"])
    for mixture in mixtures(model):
        localise(mixture.experts, along, {name: _spec(name, axes) for name in _INNER})
        mixture.experts.parts = mesh.size("tp")
        if group is not None:
            grouped = mixture.dispatch.grouped if isinstance(mixture.dispatch, SortedDispatch) else grouped_linear
            mixture.dispatch = AllToAllDispatch(group, grouped)
    return group


def _spec(name: str, axes: list[str]) -> ShardSpec:
    weight, gradient = _INNER[name]
    by_axis = {"ep": (Shard(0), Shard(0)), "tp": (weight, gradient)}
    return ShardSpec(tuple(by_axis[axis][0] for axis in axes), tuple(by_axis[axis][1] for axis in axes))


def shard_routing(mixture: MixtureOfExperts, mesh: DeviceMesh, group: Group, *, tokens: bool) -> None:
    """With tp every rank routes all tokens, and computes a partial sum of the experts and the shared expert."""
    localise(mixture.router, mesh, {"weight": SHARED, "bias": SHARED})
    if mixture.shared is not None:
        localise(mixture.shared.up, mesh, {"weight": ROWS})
        localise(mixture.shared.down, mesh, {"weight": COLUMNS})
    if mixture.shared_gate is not None:
        localise(mixture.shared_gate, mesh, {"weight": SHARED})
    mixture.copies = group.size
    target: Any = mixture
    target.tp, target.shard_tokens = group, tokens
    swap_class(mixture, _of_all_tokens)


@cache
def _of_all_tokens(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(module: Any, x_BTH: Tensor) -> Tensor:
        x_BTH, group = to_autocast(x_BTH), module.tp
        if not module.shard_tokens:
            return summed(kind.forward(module, share(x_BTH, group)), group)
        return scatter(kind.forward(module, gather(x_BTH, group, dim=1)), group, dim=1)

    return type(f"AllTokens{kind.__name__}", (kind,), {"forward": forward})


def fsdp_experts(
    model: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, *, reshard: bool, recomputed: bool
) -> None:
    """ZeRO over the ranks that hold the same experts; `reshard` frees weights after the forward pass. `recomputed`:
    selective recompute, inside of which weights are all-gathered, must not see FSDP's hooks."""
    if mesh.experts is None:
        return
    axes = ("expert_replicate", "expert_shard") if mesh.size("expert_replicate") > 1 else ("expert_shard",)
    for mixture in mixtures(model):
        fully_shard(mixture.experts, mesh=mesh.experts[axes], mp_policy=policy, reshard_after_forward=reshard)
        for hooks in (mixture.experts._forward_pre_hooks, mixture.experts._forward_hooks) if recomputed else ():
            for key, hook in list(hooks.items()):
                hooks[key] = _outside(hook)


def _outside(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Without the dispatch modes through which selective recompute sees every operator."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return hook(*args, **kwargs)

    return run


def is_of_expert(parameter: Tensor) -> bool:
    """Whether only some ranks hold this parameter, because ep distributes it."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
