"""Work: seconds that one device spends on a layer or on an end of the model, by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from armillary.planning.device_model.layout_arrays import Array


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one micro-batch on one device, by what they are spent on, and kernels launched."""

    gemm_forward: Array
    """matrix products of the forward pass"""
    gemm_backward: Array
    """of the backward pass: two a product"""
    attention_forward: Array
    """attention of the forward pass"""
    attention_backward: Array
    """of the backward pass"""
    memory_forward: Array
    """norms, activations, rotations, routing, casts: bound by memory"""
    memory_backward: Array
    """of the backward pass"""
    again_selective: Array
    """what selective recomputation repeats"""
    kernels_forward: Array
    """kernels launched"""
    kernels_backward: Array
    """kernels launched"""
    tp_products: Array
    """seconds of the products beside which tensor-parallel exchanges can run, both passes"""

    @property
    def forward(self) -> Array:
        return self.gemm_forward + self.attention_forward + self.memory_forward

    @property
    def backward(self) -> Array:
        return self.gemm_backward + self.attention_backward + self.memory_backward

    def scaled(self, times: Array | float) -> Work:
        return Work(**{field.name: getattr(self, field.name) * times for field in fields(self)})

    def plus(self, other: Work) -> Work:
        return Work(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def nothing(count: int) -> Work:
    return Work(**{field.name: np.zeros(count) for field in fields(Work)})
