"""Rules for the kernels that serving engines (vLLM, SGLang, AITER) bring along, where their arguments say enough."""

from collections.abc import Callable

from armillary.profiling.trace.op_call import Call
from armillary.profiling.work.armillary_rules import one_pass
from armillary.spec.arithmetic.ops import Op, OpKind


def _updated(kind: OpKind, tensors: int, flops_each: float = 5) -> Callable[[Call], Op]:
    """The first `tensors` arguments are read, and as much is written; the rest are read."""

    def rule(call: Call) -> Op:
        changed = [call.tensor(i) for i in range(tensors)]
        read = sum(t.bytes for t in call.tensors)
        return call.op(kind, flops_each * changed[0].count, read, sum(t.full_bytes for t in changed))

    return rule


def _rotary(call: Call) -> Op:
    """(positions, queries, keys, head size, table of sines): one row of the table per position."""
    positions, table = call.tensor(0), call.tensor(4)
    rotated = [call.tensor(i) for i in (1, 2) if call.has_tensor(i)]
    moved = sum(t.bytes for t in rotated)
    read = positions.bytes + positions.count * table.shape[-1] * table.size
    return call.op("elementwise", 3 * sum(t.count for t in rotated), read + moved, moved, rotated[0].dtype)


def _store(call: Call) -> Op:
    """(keys, values, key cache, value cache, slots): one row per token goes into the cache, for any cache size."""
    keys, values, cache, slots = (call.tensor(i) for i in (0, 1, 2, 4))
    written = (keys.count + values.count) * cache.size
    return call.op("copy", 0, keys.bytes + values.bytes + slots.bytes, written)


SERVING: dict[str, Callable[[Call], Op]] = {
    # results are among the arguments, so each tensor moves once: (out, in, weight)
    **dict.fromkeys(
        (
            "_C::rms_norm",
            "aiter::rmsnorm",
            "aiter::add_rmsnorm",
            "aiter::rmsnorm2d_fwd_with_add_ck",
            "sgl_kernel::rmsnorm",
        ),
        one_pass("norm"),
    ),
    **dict.fromkeys(
        ("_C::fused_add_rms_norm", "sgl_kernel::fused_add_rmsnorm", "vllm::rocm_aiter_rmsnorm2d_fwd_with_add"),
        _updated("norm", 2),
    ),
    **dict.fromkeys(("aiter::rms_norm", "vllm::rocm_aiter_rms_norm"), _updated("norm", 1)),
    **dict.fromkeys(
        (
            "_C::silu_and_mul",
            "_C::gelu_and_mul",
            "_C::gelu_tanh_and_mul",
            "sgl_kernel::silu_and_mul",
            "sgl_kernel::gelu_and_mul",
            "_C::static_scaled_fp8_quant",
        ),
        one_pass("elementwise", flops_each=3),
    ),
    **dict.fromkeys(("_C::rotary_embedding", "sgl_kernel::rotary_embedding"), _rotary),
    **dict.fromkeys(
        ("_C_cache_ops::reshape_and_cache_flash", "_C_cache_ops::reshape_and_cache", "sglang::store_cache"), _store
    ),
}
