"""Rules for attention: which arguments of each kernel are queries, keys and values, and which describe the mask."""

from collections.abc import Callable

from armillary.profiling.trace.op_call import Call, NoModel, Shape, Tensor
from armillary.spec.arithmetic import attention_ops
from armillary.spec.arithmetic.ops import Op

ALWAYS = -1
"""place of the causal flag of kernels whose mask is not in the trace: causal is the usual one"""


def attention(
    q: int, causal: int, *, backward: bool = False, heads_first: bool = True, pages: int = 1_000
) -> Callable[[Call], Op]:
    """Queries are argument `q`, keys and values the next two; `causal` is the flag's place, `pages` that of a table of
    cache blocks: with one, how much is read is not in the trace. Packed batches (three dims) are taken to hold
    sequences of equal length: their lengths are not in a trace."""

    def rule(call: Call) -> Op:
        query, key, value = (call.tensor(q + i) for i in range(3))
        if call.has_tensor(pages) and call.tensor(pages).shape:
            raise NoModel
        masked = _is_causal(call, causal)
        if len(query.shape) == 3:
            return _varlen(call, query, key, value, q, masked, backward)
        b, h, t, d = query.shape if heads_first else _heads_first(query.shape)
        _, kv_h, s, _ = key.shape if heads_first else _heads_first(key.shape)
        shape = attention_ops.AttentionShape(
            heads=h, kv_heads=kv_h, qk_dim=d, v_dim=value.shape[-1], causal=masked and t <= s
        )
        return _make(call, shape, [(t, s)] * b, query.dtype, backward)

    return rule


def _is_causal(call: Call, place: int) -> bool:
    """A flag, or the number of a mask's kind: 1 and 2 are causal, from the top left and from the bottom right."""
    if place == ALWAYS:
        return True
    return call.flag(place) or (place < len(call.concrete) and call.concrete[place] in ("1", "2"))


def _heads_first(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[1], shape[3])


def _varlen(call: Call, query: Tensor, key: Tensor, value: Tensor, q: int, causal: bool, backward: bool) -> Op:
    if len(key.shape) != 3 or len(value.shape) != 3:
        raise NoModel
    offsets = next((t for t in call.args[q + 3 :] if isinstance(t, Tensor) and len(t.shape) == 1), Tensor((2,)))
    sequences = max(1, offsets.count - 1)
    shape = attention_ops.AttentionShape(
        heads=query.shape[1], kv_heads=key.shape[1], qk_dim=query.shape[2], v_dim=value.shape[2], causal=causal
    )
    spans = [(-(-query.shape[0] // sequences), -(-key.shape[0] // sequences))] * sequences
    return _make(call, shape, spans, query.dtype, backward)


def _make(
    call: Call, shape: attention_ops.AttentionShape, spans: list[attention_ops.Span], dtype: str, backward: bool
) -> Op:
    make = attention_ops.attention_backward if backward else attention_ops.attention
    return make(call.name, shape, spans, dtype=dtype)


def flex_template(call: Call) -> Op:
    """Inductor's flex kernels: queries, keys, values first, forward and backward."""
    return attention(0, ALWAYS, backward="backward" in call.name)(call)


ATTENTION: dict[str, Callable[[Call], Op]] = {
    "_scaled_dot_product_flash_attention": attention(0, 4),
    "_scaled_dot_product_flash_attention_for_cpu": attention(0, 4),
    "_scaled_dot_product_efficient_attention": attention(0, 6),
    "_scaled_dot_product_cudnn_attention": attention(0, 6),
    "_scaled_dot_product_fused_attention_overrideable": attention(0, 5),
    "_flash_attention_forward": attention(0, 8, heads_first=False),
    "_efficient_attention_forward": attention(0, 9, heads_first=False),
    "_cudnn_attention_forward": attention(0, 10),
    "_scaled_dot_product_flash_attention_backward": attention(1, 11, backward=True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention(1, 7, backward=True),
    "_scaled_dot_product_efficient_attention_backward": attention(1, 11, backward=True),
    "_scaled_dot_product_cudnn_attention_backward": attention(1, 14, backward=True),
    "_scaled_dot_product_fused_attention_overrideable_backward": attention(1, 13, backward=True),
    "_flash_attention_backward": attention(1, 11, backward=True, heads_first=False),
    "_efficient_attention_backward": attention(1, 14, backward=True, heads_first=False),
    "_cudnn_attention_backward": attention(1, 14, backward=True),
    "flex_attention": attention(0, ALWAYS),
    "flex_attention_backward": attention(0, ALWAYS, backward=True),
    "torch_attn::_varlen_attn": attention(0, 7, heads_first=False, pages=12),
    "torch_attn::_varlen_attn_backward": attention(1, 10, backward=True, heads_first=False),
    "flash_attn::_flash_attn_forward": attention(0, 5, heads_first=False),
    "flash_attn::_flash_attn_varlen_forward": attention(0, 9, heads_first=False, pages=15),
    "flash_attn::_flash_attn_backward": attention(1, 11, backward=True, heads_first=False),
    "flash_attn::_flash_attn_varlen_backward": attention(1, 15, backward=True, heads_first=False),
    **dict.fromkeys(
        ("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward"), attention(0, 24, heads_first=False, pages=14)
    ),
    **dict.fromkeys(
        ("flash_attn_3::bwd", "flash_attn_3::_flash_attn_backward"), attention(1, 16, backward=True, heads_first=False)
    ),
    "aiter::fmha_v3_fwd": attention(0, 5, heads_first=False),
}
