"""ZeRO stages and FSDP on torch's fully_shard: optimizer states, gradients and weights are sharded over the shard axis.

In all three stages each rank has its shard of the fp32 weights, gradients and states between steps (Rajbhandari et al.
2020); they differ in what stays unsharded inside a step. With replicas (HSDP) gradient shards are all-reduced.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from armillary.model.transformer import Transformer

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """Gradients are reduced in fp32; cos and sin, which come from outside, stay as they are."""
    half = HALF.get(precision)
    return MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False
    )


def apply_fsdp(model: Transformer, mesh: DeviceMesh, *, zero: int, precision: str) -> None:
    """Shard the model, block by block; `mesh` is the shard axis, or replicate and shard.

    Embedding, last norm and head belong to the root, which stays unsharded from the forward pass to the end of the
    backward pass: the loss reads the head outside the forward pass.
    """
    policy = policy_of(precision)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    if zero == 3 and model.embedding is not None and model.output is not None:
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded(model):
        # sums, not means: the loss is divided by the global count of targets. gloo knows no scaled sums
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def micro_batch(model: nn.Module, *, zero: int, last: bool) -> Iterator[None]:
    """One of several forward and backward passes: what is reduced now, and what stays unsharded for the next."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or zero > 1)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or zero == 3)
    yield


def reshard(model: nn.Module) -> None:
    """Reshard after a forward pass without a backward pass."""
    for module in _sharded(model):
        module.reshard()
