"""From an operator's name and the shapes it was called with to its FLOPs and bytes, in the terms of spec.ops.

Compulsory traffic, as everywhere: operands read once, results written once. One of torch's own operators without a rule
is assumed to read and write each tensor once, which is the least it can do; GEMMs, attention, embeddings and
operators of other libraries without a rule have no model, rather than a wrong one.
"""

import re
from collections.abc import Callable
from functools import cache

from armillary.profiling.trace.op_call import Call, NoModel, call_of
from armillary.profiling.trace.trace import Signature
from armillary.profiling.work.rules import RULES, broadcast, foreach, fused, fused_optimizer, unknown
from armillary.spec.arithmetic.ops import Op

WORK_OF_KIND = {
    "matmul": "gemm",
    "conv": "conv",
    "attention": "attention",
    "norm": "norm",
    "softmax": "softmax",
    "elementwise": "elementwise",
    "embedding": "embedding",
    "loss": "softmax",
    "optimizer": "optimizer",
    "reduction": "elementwise",
    "copy": "copy",
    "sampling": "softmax",
    "collective": "collective",
}
"""spec.ops kind -> the class a profile shows"""
_NOT_A_PASS = re.compile(
    r"(^|_|b|add|int)mm(_|$)|matmul|gemm|linear(?!1d)|einsum|bilinear|conv(?!ert)|deconv|_nnpack|attention|attn|sdpa"
    r"|rnn|lstm|gru_|gru$|embedding|linalg|cholesky|svd|(^|_)(eig|lu|qr)|_solve|inverse|cdist|fft|_mkl|mkldnn|cudnn"
    r"|miopen|transformer|multi_head|new_(zeros|ones|full|empty)|record_stream|resize|_pool|upsample|grid_sample"
)
"""torch's operators whose traffic is not that of their tensors: without a rule they have no model"""
_WRAPPERS = ("linear", "embedding", "stack", "clone", "max_pool2d", *("zeros_like", "ones_like", "full_like"))
"""operators with a rule whose work is done by the operators they call"""


def op_of(name: str, signature: Signature | None, list_type: str = "float") -> Op | None:
    """The work of one call, or None where it does none or too little is known; lists of tensors are taken to hold
    `list_type` where the trace does not say."""
    if signature is None:
        return None
    call = call_of(name, signature, list_type)
    if not call.tensors:
        return None
    try:
        return _rule(name)(call)
    except (NoModel, IndexError, ValueError, KeyError, ZeroDivisionError):
        return None  # arguments of another version than the rule was written for


def is_explicit(name: str) -> bool:
    """Whether the operator has a rule of its own, and does its work itself."""
    return not is_guess(name) and name.removeprefix("aten::") not in _WRAPPERS


def is_guess(name: str) -> bool:
    """Whether the operator has no rule and is assumed to touch each tensor once."""
    return _rule(name) is broadcast


@cache
def _rule(name: str) -> Callable[[Call], Op]:
    base = name.removeprefix("aten::")
    if name.startswith(("triton_", "cpp_fused")):
        return fused
    if base.startswith("_foreach_"):
        return foreach
    if base.startswith("_fused_") and base.rstrip("_").split("_")[-1] in ("adam", "adamw", "sgd", "adagrad", "lamb"):
        return fused_optimizer
    guess = broadcast if name.startswith("aten::") and not _NOT_A_PASS.search(base) else unknown
    return RULES.get(base, guess)
