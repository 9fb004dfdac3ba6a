"""Attention counts, held against masks drawn out in full and against torch's FLOP counter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.spec.arithmetic.attention_ops import (
    AttentionShape,
    attended_pairs,
    attention,
    attention_backward,
    keys_read,
    self_spans,
    simplicial_attention,
    triples,
)


def shape(**changes: Any) -> AttentionShape:
    return AttentionShape(**({"heads": 8, "kv_heads": 2, "qk_dim": 16, "v_dim": 16} | changes))


def visible(query: int, key: int, mask: AttentionShape) -> bool:
    """The mask as one would draw it."""
    if mask.chunk and query // mask.chunk != key // mask.chunk:
        return False
    return key <= query and (not mask.window or key > query - mask.window)


SPANS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda s: (s[0], s[0] + s[1]))
MASKS = st.one_of(
    st.just(shape()),
    st.integers(1, 50).map(lambda w: shape(window=w)),
    st.integers(1, 50).map(lambda c: shape(chunk=c)),
)


@settings(deadline=None)
@given(SPANS, MASKS)
def test_pairs_and_keys_read_equal_the_drawn_mask(span: tuple[int, int], mask: AttentionShape) -> None:
    queries, keys = span
    seen = [(q, k) for q in range(keys - queries, keys) for k in range(keys) if visible(q, k, mask)]
    assert attended_pairs(span, mask) == len(seen)
    if queries:
        assert keys_read(span, mask) == len({k for _, k in seen})


@settings(deadline=None)
@given(st.integers(1, 200), MASKS)
def test_half_cuts_the_diagonal_in_two(length: int, mask: AttentionShape) -> None:
    """The MFU convention counts half of each query's own key, wherever the mask still grows."""
    exact, half = attended_pairs((length, length), mask), attended_pairs((length, length), mask, half=True)
    assert exact - length / 2 <= half <= exact
    assert attended_pairs((length, length), shape(), half=True) == length**2 / 2


def test_noncausal_sees_everything() -> None:
    assert attended_pairs((3, 10), shape(causal=False)) == 30


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_plain_attention_agrees_with_torch(kv_heads: int) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(2, 8, 64, 16, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 64, 16, requires_grad=True) for _ in range(2))
    here, spans = shape(kv_heads=kv_heads), self_spans([64, 64])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert counter.get_total_flops() == attention("a", here, spans, dtype="fp32", flash=False).flops
        out.sum().backward()
    both = [f("a", here, spans, dtype="fp32", flash=False).flops for f in (attention, attention_backward)]
    assert counter.get_total_flops() == sum(both)


def test_flash_attention_agrees_with_torch() -> None:
    """torch counts the unmasked matrix, so the mask is off; its backward is 2.5 × the forward, as ours."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(2, 8, 64, 16, device="meta", dtype=torch.bfloat16)
    here, spans = shape(kv_heads=8, causal=False), self_spans([64, 64])
    forward, backward = (f("a", here, spans, dtype="bf16") for f in (attention, attention_backward))
    with FlopCounterMode(display=False) as counter:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
        assert counter.get_total_flops() == forward.flops
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out[0], q, q, q, out[0], out[1], None, None, 64, 64, 0.0, False, out[6], out[7]
        )
    assert counter.get_total_flops() == forward.flops + backward.flops
    assert backward.flops == 2.5 * forward.flops


def test_flash_moves_no_scores() -> None:
    spans = self_spans([1024])
    flash, plain = (attention("a", shape(), spans, dtype="bf16", flash=f) for f in (True, False))
    q, kv, out = 1024 * 8 * 16 * 2, 1024 * 2 * 32 * 2, 1024 * 8 * (16 * 2 + 4)
    assert (flash.bytes_read, flash.bytes_written) == (q + kv, out)
    assert plain.bytes - flash.bytes == 4 * 8 * 1024 * 1024 * 2
    assert plain.flops == 2 * 2 * 8 * 32 * 1024 * 1024 / 2  # the whole matrix, masked afterwards
    assert flash.flops == 2 * 8 * 32 * 1024 * 1025 / 2


def test_decode_reads_the_cache_once_and_the_window_bounds_it() -> None:
    spans = [(1, 1000), (1, 100)]
    full = attention("a", shape(), spans, dtype="bf16")
    assert full.flops == 2 * 8 * 32 * 1100
    cache = 1100 * 2 * 32
    assert full.bytes_read == 2 * 8 * 16 * 2 + cache * 2
    assert attention("a", shape(), spans, dtype="bf16", kv_dtype="fp8").bytes_read == 2 * 8 * 16 * 2 + cache
    windowed = attention("a", shape(window=64), spans, dtype="bf16")
    assert windowed.flops == 2 * 8 * 32 * 128


def test_latent_cache_is_read_once_for_keys_and_values() -> None:
    absorbed = shape(heads=128, kv_heads=1, qk_dim=576, v_dim=512, latent=True)
    op = attention("a", absorbed, [(1, 4096)], dtype="bf16")
    assert op.flops == 2 * 128 * (576 + 512) * 4096
    assert op.bytes_read == 128 * 576 * 2 + 4096 * 576 * 2


@settings(deadline=None)
@given(SPANS, st.integers(1, 30), st.integers(1, 30))
def test_triples_equal_the_drawn_windows(span: tuple[int, int], window_1: int, window_2: int) -> None:
    queries, keys = span
    drawn = sum(min(p + 1, window_1) * min(p + 1, window_2) for p in range(keys - queries, keys))
    assert triples(span, window_1, window_2) == drawn


def test_simplicial_matches_the_published_shape() -> None:
    """B=4, 8k tokens, 128 query heads of 128, windows 32 × 512: 33.9 TFLOP of matrix products were reported."""
    here = shape(heads=128, kv_heads=1, qk_dim=128, v_dim=128)
    spans = self_spans([8192] * 4)
    forward = simplicial_attention("s", here, spans, window_1=32, window_2=512, dtype="bf16")
    assert forward.flops == pytest.approx(33.9e12, rel=0.01)
    backward = simplicial_attention("s", here, spans, window_1=32, window_2=512, dtype="bf16", backward=True)
    assert backward.flops == 3 * forward.flops


def test_simplicial_with_one_second_key_is_plain_attention() -> None:
    plain = attention("a", shape(window=32), self_spans([100]), dtype="bf16")
    op = simplicial_attention("s", shape(), self_spans([100]), window_1=32, window_2=1, dtype="bf16")
    assert op.flops == plain.flops
