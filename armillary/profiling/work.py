"""From an operator's name and the shapes it was called with to its FLOPs and bytes, in the terms of spec.ops.

Compulsory traffic, as everywhere: operands read once, results written once. An operator without a rule of its own is
taken to read its tensors and write one as large as they broadcast to, which is the least it can do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from armillary.profiling.call import Call, NoModel, call_of
from armillary.profiling.trace import Signature
from armillary.profiling.work_rules import RULES, broadcast, foreach, fused, fused_optimizer
from armillary.spec.ops import Op

WORK_OF_KIND = {
    "matmul": "gemm", "conv": "conv", "attention": "attention", "norm": "norm", "softmax": "softmax",
    "elementwise": "elementwise", "embedding": "embedding", "loss": "softmax", "optimizer": "optimizer",
    "reduction": "elementwise", "copy": "copy", "sampling": "softmax", "collective": "collective",
}  # fmt: skip
"""spec.ops kind -> the class a profile shows"""
_IMPLEMENTATION = re.compile(
    r"aten::(_convolution|cudnn_conv|mkldnn_conv|miopen_conv|_?slow_conv|_?thnn_conv|_?conv_depthwise|_nnpack"
    r"|cudnn_batch_norm_backward_impl)"
)
"""what a convolution calls in turn: its arguments come in many orders, so the caller's are read"""


def op_of(name: str, signature: Signature | None) -> Op | None:
    """The work of one call, or None where it does none or too little is known."""
    if signature is None or _IMPLEMENTATION.match(name):
        return None
    call = call_of(name, signature)
    if not call.tensors:
        return None
    try:
        return _rule(name)(call)
    except (NoModel, IndexError, ZeroDivisionError):
        return broadcast(call)


def is_explicit(name: str) -> bool:
    """Whether the operator has a rule of its own, and does its work itself."""
    base = name.removeprefix("aten::")
    return _rule(name) is not broadcast and base not in ("linear", "embedding", "stack", "clone")


def _rule(name: str) -> Callable[[Call], Op]:
    base = name.removeprefix("aten::")
    if name.startswith("triton_") or name.startswith("cpp_fused"):
        return fused
    if base.startswith("_foreach_"):
        return foreach
    if base.startswith("_fused_") and base.rstrip("_").split("_")[-1] in ("adam", "adamw", "sgd", "adagrad", "lamb"):
        return fused_optimizer
    return RULES.get(base, broadcast)
