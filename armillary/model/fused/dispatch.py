"""Which blocks can run as the two fused functions of passes.py, and the forward pass that does.

Checked at every call, because a layer may be wrapped (adapters, tensor parallelism, hooks) after it was built.
"""

from typing import Any

from torch import Tensor, nn

from armillary.model.fused.passes import FusedOptions, OutMlpFunction, QkvFunction, norm_arguments
from armillary.model.fused.passes_fp8 import Fp8OutMlpFunction, Fp8QkvFunction
from armillary.model.layers.attention import Attention
from armillary.model.layers.attention_forms import Attend
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm
from armillary.model.layers.rope import CosSin
from armillary.model.low_precision.fp8 import Fp8Linear


def fits(block: Any) -> bool:
    """Whether a `transformer.Block` has norms before attention and a dense MLP, unwrapped and unsharded linear layers
    without biases, and plain rotary heads."""
    attention, mlp = block.attention, block.mlp
    if block.parallel or block.residual_scale != 1.0 or type(mlp) is not MLP or not isinstance(attention, Attention):
        return False
    if block.attention_post_norm is not None or block.mlp_post_norm is not None:
        return False
    if attention.q_norm is not None or attention.clip is not None or not attention.rotates or attention.has_gate:
        return False
    norms, linears = (block.attention_norm, block.mlp_norm), (attention.qkv, attention.out, mlp.up, mlp.down)
    kind = nn.Linear
    if any(type(x) is Fp8Linear for x in linears):  # all of them, or the plain forward pass
        if block.fused is None or block.fused.fp8 is None:
            return False
        kind = Fp8Linear
    return all(untouched(x, Norm) for x in norms) and all(untouched(x, kind) and x.bias is None for x in linears)


def run(block: Any, x: Tensor, cos_sin: CosSin, attend: Attend, layer: int, fused: FusedOptions) -> Tensor:
    attention, mlp = block.attention, block.mlp
    x = x.to(fused.residual_dtype or attention.qkv.weight.dtype)
    is_fp8 = type(attention.qkv) is Fp8Linear
    qkv, out_mlp = (Fp8QkvFunction, Fp8OutMlpFunction) if is_fp8 else (QkvFunction, OutMlpFunction)
    cos, sin = cos_sin[attention.sliding]
    weight, bias, *norm = norm_arguments(block.attention_norm)
    heads = (attention.group, attention.head_dim, attention.interleaved)
    q, k, v, x = qkv.apply(x, weight, bias, attention.qkv.weight, cos, sin, fused, tuple(norm), heads)
    mixed = attend(layer, q, k, v, attention.options()).flatten(2)
    weight, bias, *norm = norm_arguments(block.mlp_norm)
    return out_mlp.apply(  # type: ignore[no-any-return]
        mixed,
        x,
        attention.out.weight,
        weight,
        bias,
        mlp.up.weight,
        mlp.down.weight,
        fused,
        tuple(norm),
        (mlp.activation, mlp.gated),
    )


def untouched(module: Any, kind: Any) -> bool:
    """A module of exactly this class, with unsharded weights and without hooks."""
    if type(module) is not kind or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return False
    return all(type(parameter.data) is Tensor for parameter in module._parameters.values() if parameter is not None)
