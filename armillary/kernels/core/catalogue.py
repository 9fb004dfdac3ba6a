"""All operations by name, as `bench kernels` lists them."""

from importlib import import_module

from armillary.errors import unknown
from armillary.kernels.core.op import Op

# name -> module and attribute that hold its Op
OPS: dict[str, str] = {
    "norm": "norm.norm:NORM",
    "add_norm": "norm.norm:ADD_NORM",
    "rope": "pointwise.rope:ROPE",
    "activate": "pointwise.activation:ACTIVATE",
    "linear_cross_entropy": "loss.linear_cross_entropy:LINEAR_CROSS_ENTROPY",
    "attention": "attention.attention:ATTENTION",
    "small_linear": "gemm.skinny:SMALL_LINEAR",
    "grouped_linear": "gemm.grouped:GROUPED_LINEAR",
    "fp8_linear": "fp8.linear:FP8_LINEAR",
    "fp8_matmul": "fp8.matmul:FP8_MATMUL",
    "paged_attention": "paged.paged_attention:PAGED_ATTENTION",
    "qkv_cache": "paged.qkv_to_cache:QKV_CACHE",
    "sample": "sampling.sampling:SAMPLE",
    "logprobs": "sampling.logprobs:LOGPROBS",
}


def find_op(name: str) -> Op:
    if name not in OPS:
        raise unknown("operation", name, OPS)
    module, _, attribute = OPS[name].partition(":")
    op = getattr(import_module(f"armillary.kernels.{module}"), attribute)
    assert isinstance(op, Op) and op.name == name, f"{OPS[name]} is not the op {name}"
    return op
