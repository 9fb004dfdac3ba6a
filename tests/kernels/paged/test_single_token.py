"""One new token of a few sequences, from the projection through attention: as the two ops one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.paged.qkv_to_cache import QkvOptions, attend_tokens, can_attend
from tests.kernels.interpreter import needs_interpreter

PAGE = 16


def case(
    lengths: list[int],
    kv_heads: int = 2,
    group: int = 2,
    size: int = 32,
    norm: str = "rms",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    weights: bool = True,
    rotates: bool = True,
    **layer: Any,
) -> tuple[Any, ...]:
    """Arguments of `attend_tokens`; what no sequence has written yet is NaN. `layer` are options of heads and of
    attention, sinks and the scale of queries as flags."""
    torch.manual_seed(sum(lengths))
    rows, pages = len(lengths), max(lengths) // PAGE + 1
    tables = (torch.randperm(rows * pages) + 1).view(rows, pages).int()
    cache = torch.full((rows * pages + 1, 2, kv_heads, PAGE, size), torch.nan)
    slots = []
    for table, length in zip(tables, lengths, strict=True):
        for at in range(length - 1):
            cache[table[at // PAGE], :, :, at % PAGE] = torch.randn(2, kv_heads, size)
        last = length - 1
        slots.append(int(table[last // PAGE]) * PAGE + last % PAGE if length else -1)
    angles = torch.randn(rows, size // 2, device=device)
    has_weights = norm == "rms" and weights
    norms = [(1 + torch.randn(size) / 4).to(device, dtype) if has_weights else None for _ in "qk"]
    q_scale = 1 + torch.rand(rows, device=device) if layer.pop("q_scale", False) else None
    sinks = torch.randn(kv_heads * group, device=device) if layer.pop("sinks", False) else None
    batch = PagedBatch(
        tables_BP=tables.to(device),
        starts=torch.arange(rows + 1, device=device).int(),
        lengths_B=torch.tensor(lengths, device=device).int(),
        max_query=1,
    )
    interleaved = layer.pop("interleaved", False)
    heads = QkvOptions(norm=norm, q_weight=norms[0], k_weight=norms[1], interleaved=interleaved, q_scale_T=q_scale)
    qkv = torch.randn(rows, kv_heads * (group + 2) * size).to(device, dtype)
    return (
        qkv,
        cache.to(device, dtype),
        torch.tensor(slots, device=device),
        angles.cos() if rotates else None,
        angles.sin() if rotates else None,
        heads,
        batch,
        AttentionOptions(scale=size**-0.5, sinks_N=sinks, **layer),
    )


def both(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results and caches: the kernel's, and the reference's in fp32."""
    from armillary.kernels.paged.fused_decode_triton import attend_tokens as by_kernel

    qkv, cache, *rest = arguments
    mine, right = cache.clone(), cache.float()
    wide = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in rest]
    heads = wide[3]
    if heads.q_weight is not None:
        wide[3] = replace(heads, q_weight=heads.q_weight.float(), k_weight=heads.k_weight.float())
    return by_kernel(qkv, mine, *rest), attend_tokens(qkv.float(), right, *wide), mine, right


@needs_interpreter
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "norm"),
    [([1, 70], 2, 3, "rms"), ([2, 2100], 1, 8, "none")],
)
def test_it_is_the_two_ops_one_after_the_other(lengths: list[int], kv_heads: int, group: int, norm: str) -> None:
    mine, right, cache, cache_right = both(case(lengths, kv_heads, group, norm=norm))
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, cache_right, rtol=1e-5, atol=1e-5, equal_nan=True)


LAYERS: dict[str, dict[str, Any]] = {
    "gpt-oss, sliding": {"norm": "none", "sinks": True, "window": 30},
    "gpt-oss, full": {"norm": "none", "sinks": True},
    "llama 4, chunked": {"weights": False, "interleaved": True, "chunk": 48},
    "llama 4, no rope": {"norm": "none", "rotates": False, "q_scale": True},
}


@needs_interpreter
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lengths", [[1, 70], [49, 48, 200]])
def test_sinks_windows_chunks_and_other_rotations(layer: str, lengths: list[int]) -> None:
    arguments = case(lengths, 2, 3, **LAYERS[layer])
    assert can_attend(*arguments[:2], arguments[3], *arguments[5:])
    mine, right, cache, cache_right = both(arguments)
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, cache_right, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_interpreter
def test_keys_before_a_window_are_not_read() -> None:
    """Their blocks may hold another sequence by now."""
    arguments = case([100], window=20, norm="none")
    arguments[1][arguments[6].tables_BP[0, :5].long()] = torch.nan
    mine, *_ = both(arguments)
    assert mine.isfinite().all()


@needs_interpreter
def test_padding_writes_nothing_and_is_no_nan() -> None:
    mine, right, cache, cache_right = both(case([33, 0, 5], kv_heads=1, norm="none"))
    torch.testing.assert_close(mine[[0, 2]], right[[0, 2]], rtol=1e-5, atol=1e-5)
    assert mine[1].isfinite().all()
    torch.testing.assert_close(cache, cache_right, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_is_not_plain_is_left_to_others() -> None:
    qkv, cache, _, cos, _, heads, batch, options = case([20])
    assert can_attend(qkv, cache, cos, heads, batch, options)
    assert not can_attend(qkv, cache, cos[:, :8], heads, batch, options)
    assert not can_attend(qkv, cache.half(), cos, heads, batch, options)
    assert not can_attend(qkv, cache, cos, heads, replace(batch, max_query=2), options)
    assert not can_attend(qkv, cache, cos, heads, batch, replace(options, softcap=3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_a_gpu(dtype: torch.dtype, layer: str) -> None:
    mine, right, *_ = both(case([300, 9000], 8, 8, 64, dtype=dtype, device="cuda", **LAYERS[layer]))
    assert (mine.float() - right).norm() / right.norm() < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "size"),
    [([1], 8, 4, 128), ([257], 8, 4, 128), ([300], 4, 8, 64), ([9000, 3, 77], 2, 4, 128), ([40], 2, 3, 256)],
)
def test_on_a_gpu(dtype: torch.dtype, lengths: list[int], kv_heads: int, group: int, size: int) -> None:
    mine, right, cache, cache_right = both(case(lengths, kv_heads, group, size, dtype=dtype, device="cuda"))
    assert (mine.float() - right).norm() / right.norm() < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    written = ~cache_right.isnan()
    assert torch.equal(written, ~cache.isnan())
    assert (cache.float() - cache_right)[written].norm() / cache_right[written].norm() < 1e-2
