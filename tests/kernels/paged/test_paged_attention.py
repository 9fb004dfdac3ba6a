"""Paged attention: the kernels against the plain reference, and the reference against attention in one piece."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.paged.paged_attention import (
    PAGED_ATTENTION,
    PagedCase,
    by_heads,
    by_sdpa,
    gather,
    paged_attention,
    pages_of,
)
from tests.kernels.interpreter import needs_interpreter
from tests.kernels.pages import Shape, batch, error, wide


def fast():  # type: ignore[no-untyped-def]
    return PAGED_ATTENTION.version("triton").load()  # type: ignore[union-attr]


@st.composite
def shapes(draw: st.DrawFn, longest_query: int = 1) -> Shape:
    """Rows that decode, rows of a chunk of a prompt, rows without queries, rows without keys."""
    queries = draw(st.lists(st.sampled_from([0, 1, 1, longest_query]), min_size=1, max_size=4))
    lengths = [0 if draw(st.integers(0, 9)) == 0 else count + draw(st.integers(0, 90)) for count in queries]
    return Shape(
        queries=queries,
        lengths=lengths,
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 5])),
        head_dim=draw(st.sampled_from([16, 64, 80])),
        page=draw(st.sampled_from([16, 24, 64])),
        padding=draw(st.sampled_from([0, 2])),
    )


@st.composite
def hows(draw: st.DrawFn) -> dict[str, object]:
    reach = draw(st.sampled_from([0, 0, 1, 7, 40]))
    chunked = draw(st.booleans())
    return {
        "window": 0 if chunked else reach,
        "chunk": reach if chunked else 0,
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "sinks": draw(st.booleans()),
        "slopes": draw(st.booleans()),
    }


def extras(how: dict[str, object], shape: Shape) -> dict[str, object]:
    heads = shape.kv_heads * shape.group
    return {
        "window": how["window"],
        "chunk": how.get("chunk", 0),
        "softcap": how["softcap"],
        "sinks_N": torch.linspace(-2, 2, heads) if how["sinks"] else None,
        "slopes_N": torch.linspace(0.01, 0.5, heads) if how["slopes"] else None,
    }


@needs_interpreter
@settings(max_examples=6, deadline=None)
@given(shape=shapes(), how=hows())
def test_decoding_agrees(shape: Shape, how: dict[str, object]) -> None:
    inputs = batch(shape, **extras(how, shape))
    assert error(fast()(*inputs), paged_attention(*wide(inputs))) < 1e-5


@needs_interpreter
@settings(max_examples=6, deadline=None)
@given(shape=shapes(longest_query=33), how=hows())
def test_chunks_of_prompts_and_decoding_in_one_batch_agree(shape: Shape, how: dict[str, object]) -> None:
    inputs = batch(shape, **extras(how, shape))
    assert error(fast()(*inputs), paged_attention(*wide(inputs))) < 1e-5


SPLIT = [
    pytest.param(slots, sinks, reach, marks=[] if slots == 3 or (sinks and reach) else pytest.mark.slow)
    for slots, reach in ((3, {}), (3, {"window": 600}), (3, {"chunk": 890}), (40, {}), (40, {"window": 600}))
    for sinks in (False, True)
    if not (sinks and "chunk" in reach)
]


@needs_interpreter
@pytest.mark.parametrize(("slots", "sinks", "reach"), SPLIT)
def test_keys_of_a_short_chunk_of_a_long_text_are_split(
    reach: dict[str, object], sinks: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from armillary.kernels.paged import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "num_programs", lambda x, count: slots)
    shape = Shape(queries=[1, 20, 9], lengths=[40, 900, 300], kv_heads=1, group=3, head_dim=16, page=24, padding=2)
    how = {"window": 0, "softcap": 0.0, "sinks": sinks, "slopes": False} | reach
    inputs = batch(shape, **extras(how, shape))
    assert error(fast()(*inputs), paged_attention(*wide(inputs))) < 1e-5


@needs_interpreter
def test_splits_fill_the_chip_and_no_more() -> None:
    from armillary.kernels.paged.paged_attention_triton import prefill_splits

    assert [prefill_splits(programs, 132) for programs in (0, 24, 131, 132, 395, 396)] == [8, 8, 8, 4, 4, 1]


@needs_interpreter
def test_half_precision_is_as_good_as_plain_torch() -> None:
    inputs = batch(Shape(queries=[1, 1], lengths=[70, 130], group=4), dtype=torch.float16)
    right = paged_attention(*wide(inputs))
    assert error(fast()(*inputs), right) <= max(2 * error(paged_attention(*inputs), right), 1e-3)


@needs_interpreter
def test_a_row_shared_by_all_workers() -> None:
    inputs = batch(Shape(queries=[1, 1], lengths=[900, 0], kv_heads=1), sinks_N=torch.tensor([0.5, -1.0]))
    assert error(fast()(*inputs), paged_attention(*wide(inputs))) < 1e-5


@needs_interpreter
@pytest.mark.parametrize(
    ("lengths", "begins"),
    [([200] * 43, [0, 30, 60]), ([200] * 42 + [300], [0, 29, 58]), ([200] * 44, [0, 30, 60]), ([200] * 5, [0, 4, 8])],
    ids=["two tiles each", "one longer", "cut evenly anyway", "few"],
)
def test_rows_that_are_all_alike_are_left_whole(lengths: list[int], begins: list[int]) -> None:
    """Where three workers begin: 86 tiles go as 30, 30 and 26, whole rows of two, instead of as 29 each."""
    from tests.kernels.decode_start import first_tiles

    assert first_tiles(lengths, workers=3, keys=128) == begins


@needs_interpreter
@pytest.mark.parametrize("queries", [[1, 1], [20, 1]])
def test_nan_stays_in_its_own_row(queries: list[int]) -> None:
    inputs = batch(Shape(queries=queries, lengths=[50, 60], group=4))
    cache, places = inputs[1:3]
    cache[places.tables_BP[0, 0], 0, 0, 3] = torch.nan  # a key of sequence 0, KV head 0
    out = fast()(*inputs)
    assert out[: queries[0], :4].isnan().all()
    assert not out[: queries[0], 4:].isnan().any() and not out[queries[0] :].isnan().any()


@needs_interpreter
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["plain", "sinks"])
def test_a_query_that_is_nan_gives_nan_not_zeros(sinks: torch.Tensor | None) -> None:
    inputs = batch(Shape(queries=[1, 20], lengths=[1, 60]), sinks_N=sinks)
    inputs[0][0, 1, 3] = inputs[0][5, 2, 0] = torch.nan
    assert torch.equal(fast()(*inputs).isnan(), paged_attention(*inputs).isnan())
    assert fast()(*inputs)[[0, 5], [1, 2]].isnan().all()


@needs_interpreter
def test_scores_of_any_size_stay_finite() -> None:
    q, cache, *rest = batch(Shape(queries=[1, 3], lengths=[40, 50]))
    inputs = (q * 1e4, cache, *rest)
    out = fast()(*inputs)
    assert error(out, paged_attention(*wide(inputs))) < 1e-4


@needs_interpreter
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_turn_scores_around(scale: float) -> None:
    inputs = batch(Shape(queries=[20, 1], lengths=[50, 60], head_dim=16), scale=scale)
    assert error(fast()(*inputs), paged_attention(*wide(inputs))) < 1e-5


@needs_interpreter
def test_small_tensors_that_lie_apart() -> None:
    """Sinks, slopes, scales and tables as columns of something larger."""
    options = {
        "sinks_N": torch.randn(4, 2)[:, 0],
        "slopes_N": torch.rand(4, 2)[:, 1],
        "scales_2K": (torch.rand(2, 2, 2) + 0.5)[..., 0],
    }
    q, cache, places, asked = batch(Shape(queries=[20, 1], lengths=[50, 60], head_dim=16), **options)
    apart = dataclasses.replace(places, tables_BP=places.tables_BP.T.contiguous().T)
    assert apart.tables_BP.stride(1) != 1
    assert error(fast()(q, cache, apart, asked), paged_attention(*wide((q, cache, places, asked)))) < 1e-5


@needs_interpreter
def test_a_head_whose_keys_are_all_zero() -> None:
    """Its scale is 0 then, and what is not seen must not become 0 · infinity."""
    scales = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    inputs = batch(Shape(queries=[20, 1], lengths=[50, 60], head_dim=16), scales_2K=scales)
    assert error(fast()(*inputs), paged_attention(*wide(inputs))) < 1e-5


@needs_interpreter
def test_empty_batches() -> None:
    inputs = batch(Shape(queries=[], lengths=[], padding=3))
    assert torch.equal(fast()(*inputs), torch.zeros(3, 4, 64))
    inputs = batch(Shape(queries=[0, 0], lengths=[5, 0]))
    assert fast()(*inputs).shape == (0, 4, 64)


@needs_interpreter
def test_a_quantised_cache_is_scaled_per_head() -> None:
    q, cache, places, plain = batch(Shape(queries=[1, 2], lengths=[40, 50]))
    scales = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    small = (cache.permute(0, 3, 4, 1, 2) / scales).permute(0, 3, 4, 1, 2).contiguous()
    out = fast()(q, small, places, dataclasses.replace(plain, scales_2K=scales))
    assert error(out, paged_attention(*wide((q, cache, places, plain)))) < 1e-5


def test_pages_hold_a_sequence_in_order() -> None:
    cache = torch.arange(4 * 2 * 1 * 2 * 1, dtype=torch.float32).view(4, 2, 1, 2, 1)  # 4 pages of 2 tokens
    keys, values = gather(cache, pages_of(torch.tensor([3, 1]), 3, cache.shape[3]), 3, None, torch.float32)
    assert keys.flatten().tolist() == [12, 13, 4]
    assert values.flatten().tolist() == [14, 15, 6]


@settings(max_examples=18, deadline=None)
@given(
    shape=shapes(longest_query=33),
    reach=st.sampled_from([{}, {"window": 1}, {"window": 20}, {"chunk": 1}, {"chunk": 20}]),
    together=st.booleans(),
    in_order=st.booleans(),
)
def test_one_sequence_at_a_time_through_torch_agrees(
    shape: Shape, reach: dict[str, int], together: bool, in_order: bool
) -> None:
    q, cache, places, options = batch(shape, **reach)
    if in_order:
        places.tables_BP.copy_(places.tables_BP.sort().values)
        cache = cache.nan_to_num()  # places that nobody owned have an owner now
    if together:
        cache = by_heads(cache.shape, cache.dtype, cache.device).copy_(cache)
    right = paged_attention(*wide((q, cache.contiguous(), places, options)))
    assert error(by_sdpa(q, cache, places, options), right) < 1e-5


def test_pages_that_follow_each_other_are_not_copied() -> None:
    cache = by_heads((3, 8, 2, 1, 4, 16), torch.float32, torch.device("cpu"))[1]
    cache.copy_(torch.randn(cache.shape))
    for table, shares in ((torch.arange(2, 6), True), (torch.tensor([2, 3, 5, 4]), False)):
        keys, values = gather(cache, pages_of(table, 15, 4), 15, None, torch.float32)
        assert torch.equal(keys, cache[table, 0].transpose(1, 2).flatten(0, 1)[:15])
        assert torch.equal(values, cache[table, 1].transpose(1, 2).flatten(0, 1)[:15])
        assert (keys.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()) == shares


def test_the_reference_is_causal_attention() -> None:
    q, cache, places, options = batch(Shape(queries=[30], lengths=[30]))
    pages = pages_of(places.tables_BP[0], 30, cache.shape[3])
    k, v = (x.transpose(0, 1) for x in gather(cache, pages, 30, None, torch.float32))
    whole = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, is_causal=True, scale=options.scale, enable_gqa=True
    )
    assert error(paged_attention(q, cache, places, options), whole.transpose(0, 1)) < 1e-5


def test_bytes_are_those_of_keys_and_values() -> None:
    case = PagedCase(batch=2, context=1000, heads=32, kv_heads=8, head_dim=128)
    assert PAGED_ATTENTION.work(case).bytes == 2 * 2 * 8 * 1000 * 128 * 2 + 2 * 2 * 32 * 128 * 2
    ragged = dataclasses.replace(case, batch=64, ragged=True)
    assert len(set(ragged.lengths())) == 64 and max(ragged.lengths()) == 1000


GPU_CASES = {
    "bf16": {},
    "one long row": {"batch": 1, "context": 2000},
    "rows left whole": {"batch": 256, "context": 700, "kv_heads": 4},
    "many ragged rows": {"batch": 256, "context": 600, "ragged": True},
    "everything": {"dtype": "fp16", "head_dim": 80, "window": 100, "softcap": 20.0, "sinks": True, "slopes": True},
    "fp32": {"dtype": "fp32", "head_dim": 256, "page": 32},
    "a few queries": {"head_dim": 96, "page": 48, "queries": 3},
    "prompts": {"head_dim": 64, "heads": 40, "queries": 300},
    "prompts with window and sinks": {"queries": 333, "window": 128, "sinks": True},
    "prompts in chunks": {"queries": 333, "chunk": 200},
    "decoding in chunks": {"chunk": 300},
    "fp32 prompts": {"dtype": "fp32", "queries": 130, "softcap": 10.0},
    "wide heads": {"head_dim": 256, "queries": 200, "page": 256},
    "fp8 cache": {"batch": 40, "cache": "fp8"},
    "fp8 cache, prompts": {"cache": "fp8", "queries": 100, "page": 64},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_agreement_on_a_gpu(name: str) -> None:
    from armillary.kernels.core.agreement import check, expect

    case = PagedCase(**({"batch": 5, "context": 700} | GPU_CASES[name]))  # type: ignore[arg-type]
    generator = torch.Generator("cuda").manual_seed(0)
    expected = expect(PAGED_ATTENTION, PAGED_ATTENTION.inputs(case, generator), generator)
    found = check(fast(), PAGED_ATTENTION, expected)
    assert found.agreed, found.why_not


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 40, 150])
def test_one_graph_serves_any_lengths(most: int) -> None:
    inputs = batch(Shape(queries=[most, 1, 1, 1], lengths=[900, 700, 800, 600]), dtype=torch.bfloat16, device="cuda")
    fast()(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast()(*inputs)
    for queries, lengths in (([most, 1, 0, 1], [890, 1, 5, 0]), ([1, 1, 1, 0], [17, 650, 33, 0])):
        inputs[2].starts.copy_(torch.tensor([0, *queries]).cumsum(0))
        inputs[2].lengths_B.copy_(torch.tensor(lengths))
        graph.replay()
        right = paged_attention(*wide(inputs, torch.float32))
        assert error(out, right) < 1e-2
        assert torch.equal(out, fast()(*inputs))  # captured or not: the same bits


@pytest.mark.parametrize(
    ("group", "width", "dtype", "parts", "fits"),
    [
        (4, 128, torch.bfloat16, 4, True),
        (8, 64, torch.float16, 8, True),
        (4, 128, torch.bfloat16, 1, False),
        (4, 256, torch.bfloat16, 4, False),
        (71, 64, torch.bfloat16, 4, False),
        (4, 128, torch.float32, 4, False),
        (4, 128, torch.float8_e4m3fn, 4, False),
    ],
)
def test_decodes_and_prompts_run_at_once_where_they_fit(
    group: int, width: int, dtype: torch.dtype, parts: int, fits: bool
) -> None:
    from armillary.kernels.paged.paged_attention_triton import fits_beside, split_tiling

    assert fits_beside(split_tiling(torch.device("cpu"), group, 200, width, dtype), parts, width, dtype) is fits


@pytest.mark.gpu
def test_on_two_streams_memory_is_used_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, many calls whose tensors are let go at once: the same bits as one after the other."""
    from armillary.kernels.paged import paged_attention_triton as module

    inputs = batch(
        Shape(queries=[150, 1, 1, 1, 1], lengths=[3000, 700, 800, 600, 5]), dtype=torch.bfloat16, device="cuda"
    )
    found = [fast()(*inputs) for _ in range(200)]
    torch.cuda.synchronize()
    assert all(torch.equal(found[0], one) for one in found)
    launched = []
    monkeypatch.setattr(module, "side_stream", lambda stream: launched.append(stream) or stream)
    assert torch.equal(found[0], fast()(*inputs)) and launched


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 100])
def test_a_cache_in_fp8_is_written_and_read(queries: int) -> None:
    from armillary.kernels.paged.qkv_to_cache import QkvOptions
    from armillary.kernels.paged.qkv_to_cache_triton import qkv_cache

    inputs = batch(Shape(queries=[queries], lengths=[300]), dtype=torch.bfloat16, device="cuda")
    q, cache, places, options = inputs
    keys, values = gather(cache, pages_of(places.tables_BP[0], 300, cache.shape[3]), 300, None, torch.bfloat16)
    scales = torch.tensor([[0.02, 0.03], [0.01, 0.05]], device="cuda")
    small = torch.zeros(cache.shape, dtype=torch.float8_e4m3fn, device="cuda")
    place = torch.arange(300, device="cuda")
    slots = places.tables_BP[0, place // 16].long() * 16 + place % 16
    fused = torch.stack((keys, keys, keys, values), dim=2).flatten(1)  # [q, q, k, v] of each KV head
    qkv_cache(fused, small, slots, None, None, QkvOptions(scales_2K=scales))
    scaled = dataclasses.replace(options, scales_2K=scales)
    right = paged_attention(q.float(), small, places, scaled)
    out = fast()(q, small, places, scaled)
    assert error(out, right) < 1e-2
    assert error(out, paged_attention(*wide(inputs, torch.float32))) < 6e-2  # three bits of mantissa
