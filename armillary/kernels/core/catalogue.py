"""Every operation by name: what `bench kernels` goes through."""

from __future__ import annotations

from importlib import import_module

from armillary.errors import unknown
from armillary.kernels.op import Op

OPS: dict[str, str] = {
    "norm": "norm:NORM",
    "add_norm": "norm:ADD_NORM",
    "rope": "rope:ROPE",
    "activate": "gated:ACTIVATE",
    "bias_act_dropout": "bias_act_dropout:BIAS_ACT_DROPOUT",
    "cross_entropy": "cross_entropy:CROSS_ENTROPY",
    "linear_cross_entropy": "linear_cross_entropy:LINEAR_CROSS_ENTROPY",
    "attention": "attention:ATTENTION",
    "small_linear": "small_linear:SMALL_LINEAR",
    "grouped_linear": "grouped_linear:GROUPED_LINEAR",
    "fp8_linear": "fp8_linear:FP8_LINEAR",
    "fp8_matmul": "fp8_matmul:FP8_MATMUL",
    "paged_attention": "paged_attention:PAGED_ATTENTION",
    "qkv_cache": "qkv_cache:QKV_CACHE",
    "sample": "sampling:SAMPLE",
    "logprobs": "logprobs:LOGPROBS",
}
"""name -> module and attribute that hold its Op"""


def find_op(name: str) -> Op:
    if name not in OPS:
        raise unknown("operation", name, OPS)
    module, _, attribute = OPS[name].partition(":")
    op = getattr(import_module(f"armillary.kernels.{module}"), attribute)
    assert isinstance(op, Op) and op.name == name, f"{OPS[name]} is not the op {name}"
    return op


def all_ops() -> list[Op]:
    return [find_op(name) for name in OPS]
