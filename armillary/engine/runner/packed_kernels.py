"""Which kernels run the packed layers of a model."""

from collections.abc import Sequence

import torch
from torch import nn

from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.model.moe.packed_experts import PackedExperts
from armillary.model.quantized.packed_linear import packed_modules


def stackable_experts(model: nn.Module) -> list[PackedExperts]:
    """The packed experts of every layer, where kernels may read each layer as one stack; none where one cannot be."""
    found = [module for module in model.modules() if isinstance(module, PackedExperts)]
    return found if all(each.can_stack for each in found) else []


def kernels_of_packed(
    kernels: EngineKernels, model: nn.Module, stackable: Sequence[PackedExperts], weight: torch.Tensor
) -> EngineKernels:
    """`kernels` for this model, whose packed layers get theirs: linear layers on a GPU, and experts in stacks where
    kernels take them."""
    packed = packed_modules(model)
    if not packed:
        return kernels
    stacked = bool(stackable) and kernels.moe is not None and kernels.grouped_moe is not None
    for experts in stackable if stacked else ():
        experts.stack()
    in_stacks = {id(linear) for experts in stackable for linear in experts.linears} if stacked else set()
    for linear in packed:
        if weight.device.type == "cuda" and id(linear) not in in_stacks:
            linear.use_kernels(weight.dtype)
    return kernels.for_packed(stacks=stacked)
