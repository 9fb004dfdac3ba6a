"""Attention for training: every mask and every version against scores written out."""

from __future__ import annotations

import logging
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.attention.attention import (
    ATTENTION,
    AttentionCase,
    AttentionOptions,
    distances,
    num_pairs,
    reference,
    sdpa,
    seen_keys,
)
from armillary.kernels.core.agreement import check, expect, relative_error
from tests.kernels.interpreter import needs_interpreter

# a GPU that is new to the thread of a backward: torch sets it up and says so
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning", "ignore:All-NaN:RuntimeWarning")


def random(
    length: int,
    *,
    keys: int | None = None,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    batch: int = 1,
    documents: str = "",
    sparse: bool = False,
    slopes: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[object, ...]:
    torch.manual_seed(length * 7 + dim)
    keys = length if keys is None else keys

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    drawn = {
        "": None,
        "runs": torch.randint(0, 2, (batch, length), device=device).cumsum(1) // 8,
        "scattered": torch.randint(0, 3, (batch, length), device=device),
    }[documents]
    blocks = torch.rand(-(-length // 128), -(-keys // 128), device=device) < 0.6 if sparse else None
    q, k, v = normal(batch, length, heads, dim), normal(batch, keys, kv_heads, dim), normal(batch, keys, kv_heads, dim)
    alibi = torch.rand(heads, device=device) if slopes else None
    options = AttentionOptions(
        documents_BT=drawn, blocks_XY=blocks, slopes_N=alibi, window=window, softcap=softcap, causal=causal
    )
    return q, k, v, options


def assert_agrees(run, inputs) -> None:
    generator = torch.Generator(inputs[0].device).manual_seed(5)
    found = check(run, ATTENTION, expect(ATTENTION, inputs, generator))
    assert found.agreed, found.why_not


@needs_interpreter
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(1, 200),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([8, 16, 24]),
    st.sampled_from(["", "runs", "scattered"]),
    st.sampled_from([0, 2, 37]),
    st.sampled_from([0.0, 5.0]),
)
def test_any_shape(length: int, heads: tuple[int, int], dim: int, documents: str, window: int, softcap: float) -> None:
    from armillary.kernels.attention.attention_triton import attention

    more = {"documents": documents, "window": window, "softcap": softcap, "dtype": torch.float16}
    assert_agrees(attention, random(length, heads=heads[0], kv_heads=heads[1], dim=dim, **more))


@needs_interpreter
@pytest.mark.parametrize(
    "more",
    [
        {"length": 300, "sparse": True, "dtype": torch.float16},
        {"length": 70, "slopes": True, "batch": 2},
        {"length": 40, "keys": 90},
        {"length": 90, "keys": 40},
        {"length": 50, "keys": 70, "causal": False},
        {"length": 200, "causal": False, "documents": "runs", "dtype": torch.float16},
        {"length": 90, "causal": False, "documents": "scattered", "window": 20},
        {"length": 40, "keys": 150, "window": 30},
        {"length": 300, "window": 150, "dtype": torch.float16},
        {"length": 300, "dtype": torch.float16, "documents": "runs"},
        {"length": 90, "window": 20, "heads": 8, "dtype": torch.float16},
        {"length": 150, "window": 40, "heads": 16, "kv_heads": 2, "dim": 24, "dtype": torch.bfloat16, "batch": 2},
        {"length": 70, "keys": 90, "window": 33, "heads": 8, "documents": "", "dtype": torch.float16},
        {"length": 90, "window": 50, "heads": 8, "documents": "scattered", "dtype": torch.float16},
        {"length": 50, "keys": 70, "window": 9, "heads": 8, "causal": False, "dtype": torch.float16},
        {"length": 0},
    ],
    ids=lambda more: " ".join(map(str, more)),
)
def test_masks(more: dict) -> None:
    from armillary.kernels.attention.attention_triton import attention

    assert_agrees(attention, random(**more))


@needs_interpreter
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), min_size=90, max_size=90), min_size=1, max_size=2), st.booleans())
def test_document_runs(rows: list[list[int]], ascending: bool) -> None:
    from armillary.kernels.attention import mask_triton as module

    documents = torch.tensor([sorted(row) if ascending else row for row in rows])
    with patch.object(module, "_LONGEST_BLOCK", 32), patch.object(module, "_CHUNK", 16):  # several of both a row
        runs = module.document_runs(documents)
    for row, found in enumerate(documents.tolist()):
        broken = found != sorted(found)
        for at, doc in enumerate(found):
            start = max((i + 1 for i in range(at) if found[i] != doc), default=0)
            stop = min((i for i in range(at, 90) if found[i] != doc), default=90)
            assert (int(runs.run[row, at]), int(runs.run_end[row, at])) == (start, stop)
            assert (int(runs.begin[row, at]), int(runs.end[row, at])) == ((0, 90) if broken else (start, stop))


@needs_interpreter
def test_sinks_take_part_and_learn() -> None:
    from armillary.kernels.attention.attention_triton import attention

    q, k, v, *_ = random(60, heads=4, kv_heads=2)
    found = []
    for run, dtype in ((attention, torch.float32), (reference, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, torch.arange(4.0))]
        out = run(*leaves[:3], AttentionOptions(sinks_N=leaves[3]))
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, plain in zip(*found, strict=True):
        assert relative_error(mine, plain) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("length", [1, 35, 90])
def test_heads_that_share_keys_under_a_narrow_window_are_rows_of_one_block(length: int) -> None:
    """Each with its own sink; as one head per block, and as the definition."""
    from armillary.kernels.attention import tiles
    from armillary.kernels.attention.attention_triton import attention

    q, k, v, *_ = random(length, heads=16, kv_heads=2, dtype=torch.float16)
    options = AttentionOptions(sinks_N=torch.arange(16.0) / 4 - 2, window=17)
    exact = reference(*(x.double() for x in (q, k, v)), options)
    together = attention(q, k, v, options)
    with patch.object(tiles, "PACKED_NARROW", None):
        apart = attention(q, k, v, options)
    assert relative_error(together, exact) < 2e-3 and relative_error(apart, exact) < 2e-3


@needs_interpreter
@pytest.mark.parametrize(
    "more",
    [
        {"length": 300, "sparse": True, "dtype": torch.float16},
        {"length": 200, "documents": "runs", "window": 90, "slopes": True},
        {"length": 90, "keys": 130, "window": 40, "dtype": torch.float16},
        {"length": 20, "batch": 2, "heads": 8, "window": 9, "dtype": torch.float16},
        {"length": 90, "batch": 2, "heads": 3, "kv_heads": 3, "dtype": torch.float16},
    ],
    ids=lambda more: " ".join(map(str, more)),
)
def test_gradients_by_loops_over_all_heads(more: dict) -> None:
    from armillary.kernels.attention.attention_triton import merged_heads

    assert_agrees(merged_heads, random(**{"heads": 4, "kv_heads": 2, **more}))


@needs_interpreter
def test_a_narrow_window_with_a_loop_over_what_is_seen_whole() -> None:
    from armillary.kernels.attention import tiles
    from armillary.kernels.attention.attention_triton import attention

    with patch.object(tiles, "ONE_LOOP_NARROW", False):
        assert_agrees(attention, random(150, window=140, heads=4, kv_heads=2, dtype=torch.float16))


@needs_interpreter
def test_the_longest_lists_come_first() -> None:
    from armillary.kernels.attention.gradients import longest_first

    counts = torch.tensor([[0, 3], [2, 7], [1, 3], [0, 0]], dtype=torch.int32)
    assert longest_first(counts).tolist() == [1, 0, 2, 3] and longest_first(counts).dtype == torch.int32


@needs_interpreter
def test_extreme_scores_and_strided_heads() -> None:
    from armillary.kernels.attention.attention_triton import attention

    qkv = torch.randn(1, 70, 2, 3 * 16) * 6  # scores of several hundred
    assert_agrees(attention, qkv.split(16, dim=-1))


@needs_interpreter
def test_nan_reaches_the_queries_that_see_it_and_no_others() -> None:
    from armillary.kernels.attention.attention_triton import attention

    q, k, v, *_ = random(80)
    k[0, 50, 0, 3] = torch.nan
    for run in (reference, attention):
        out = run(q, k, v)
        assert out[0, 50:].isnan().all() and out[0, :50].isfinite().all()


@needs_interpreter
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_a_query_that_is_nan_gives_nan() -> None:
    from armillary.kernels.attention.attention_triton import attention

    q, k, v = torch.randn(1, 70, 2, 16), torch.randn(1, 70, 1, 16), torch.randn(1, 70, 1, 16)
    q[0, 60, 1, 3] = torch.nan
    for run in (reference, attention):
        out = run(q, k, v)
        assert out[0, 60, 1].isnan().all() and int(out.isnan().sum()) == 16


@needs_interpreter
def test_a_query_that_sees_nothing_gives_zeros() -> None:
    from armillary.kernels.attention.attention_triton import attention

    q, k, v, *_ = random(300)
    blocks = torch.ones(3, 3, dtype=torch.bool)
    blocks[1] = False
    for run in (reference, attention):
        out = run(q, k, v, AttentionOptions(blocks_XY=blocks))
        assert not out[:, 128:256].any() and out[:, :128].all()


@needs_interpreter
def test_without_keys_there_are_zeros_and_no_gradients() -> None:
    from armillary.kernels.attention.attention_triton import attention

    for run in (reference, attention):
        q, k, v = (torch.randn(1, n, 2, 16, requires_grad=True) for n in (5, 0, 0))
        out = run(q, k, v)
        assert out.shape == q.shape and not out.any()
        assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@needs_interpreter
def test_sinks_and_slopes_that_lie_apart() -> None:
    from armillary.kernels.attention.attention_triton import attention

    q, k, v, _ = random(60, heads=4, kv_heads=2)
    options = AttentionOptions(sinks_N=torch.randn(4, 2)[:, 0], slopes_N=torch.rand(4, 2)[:, 1])
    assert_agrees(attention, (q, k, v, options))


@needs_interpreter
def test_what_kernels_cannot_hold_is_left_to_torch_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from armillary.kernels.attention.attention_triton import attention

    q, k, v, _ = random(5, dim=300)
    with caplog.at_level(logging.WARNING, logger="armillary.kernels"):
        assert torch.equal(attention(q, k, v), reference(q, k, v))
        attention(q, k, v)
    assert [record.message for record in caplog.records] == [
        "attention is left to plain torch: heads of 300 dims are too wide for registers"
    ]


@needs_interpreter
def test_the_op_can_be_traced() -> None:
    from armillary.kernels.attention.attention_triton import _attention

    q, k, v, *_ = random(20)
    arguments = (q, k, v, None, None, None, None, 0.25, 0, 0.0, True)
    torch.library.opcheck(_attention, arguments, test_utils=("test_schema", "test_faketensor"))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 200), st.sampled_from(["", "runs", "scattered"]), st.sampled_from([0, 5]), st.booleans())
def test_sdpa_with_a_dense_mask(length: int, documents: str, window: int, sparse: bool) -> None:
    q, k, v, options = random(length, documents=documents, window=window)
    blocks = torch.eye(-(-length // 128), dtype=torch.bool) if sparse else None
    inputs = (q, k, v, replace(options, blocks_XY=blocks))
    torch.testing.assert_close(sdpa(*inputs), reference(*inputs), atol=1e-5, rtol=1e-5)


def test_work_counts_the_pairs_that_are_seen() -> None:
    for more in ({}, {"window": 20}, {"documents": 4}, {"documents": 2, "window": 7}):
        case = AttentionCase(batch=1, length=96, heads=1, kv_heads=1, **more)
        documents = torch.arange(96)[None] * max(1, case.documents) // 96
        options = AttentionOptions(documents_BT=documents, window=case.window)
        seen = seen_keys(distances(96, 96, torch.device("cpu")), options)
        assert num_pairs(case) == int(seen.sum())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        {"length": 1024, "heads": 8, "kv_heads": 2, "dim": 128},
        {"length": 777, "heads": 4, "kv_heads": 4, "dim": 64},
        {"length": 1000, "heads": 4, "kv_heads": 1, "dim": 80, "batch": 2},
        {"length": 500, "heads": 2, "kv_heads": 1, "dim": 256, "softcap": 20.0},
        {"length": 1024, "heads": 4, "kv_heads": 2, "dim": 128, "documents": "runs"},
        {"length": 700, "heads": 4, "kv_heads": 2, "dim": 128, "documents": "scattered", "window": 100},
        {"length": 1024, "heads": 4, "kv_heads": 2, "dim": 128, "sparse": True},
        {"length": 600, "heads": 4, "kv_heads": 2, "dim": 64, "slopes": True},
        {"length": 600, "heads": 4, "kv_heads": 2, "dim": 128, "dtype": torch.float16},
        {"length": 600, "heads": 4, "kv_heads": 2, "dim": 128, "dtype": torch.float32},
        {"length": 300, "heads": 2, "kv_heads": 1, "dim": 64, "dtype": torch.float32, "documents": "runs"},
    ],
    ids=lambda more: " ".join(map(str, more.values())),
)
def test_on_a_gpu(more: dict) -> None:
    from armillary.kernels.attention.attention_triton import attention, merged_heads

    inputs = random(**{"dtype": torch.bfloat16, **more}, device="cuda")
    assert_agrees(attention, inputs)
    assert_agrees(merged_heads, inputs)
    assert torch.equal(attention(*inputs), attention(*inputs))
