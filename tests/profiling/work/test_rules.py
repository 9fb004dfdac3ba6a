"""Rules for products, convolutions, attention and indices: what an operator's arguments say it computes and moves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import armillary.kernels
from armillary.profiling.trace.trace import Signature
from armillary.profiling.work.rules import RULES
from armillary.profiling.work.work import is_guess, op_of
from armillary.spec.arithmetic.ops import Op

B, F, INT, L, N = "c10::BFloat16", "float", "int", "long int", "Scalar"


def op(name: str, dims: list, types: list[str], concrete: tuple[str, ...] = (), strides: tuple = ()) -> Op | None:
    shapes = tuple(tuple(map(tuple, d)) if d and isinstance(d[0], list) else tuple(d) for d in dims)
    return op_of(name, Signature(shapes, tuple(types), concrete, strides))


def known(*args: object, **kwargs: object) -> Op:
    found = op(*args, **kwargs)  # type: ignore[arg-type]
    assert found is not None
    return found


# --- indices: what moves is what the index names

CACHE, ROWS = [8, 8, 4096, 64], [8, 8, 1, 64]
MOVED = 8 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("name", "dims", "types", "moved"),
    [
        ("index_copy_", [CACHE, [], [1], ROWS], [B, N, L, B], 2 * MOVED + 8),
        ("index_add_", [CACHE, [], [1], ROWS, []], [B, N, L, B, N], 3 * MOVED + 8),
        ("index_put_", [CACHE, [], ROWS, []], [B, "", B, N], 2 * MOVED),
        ("_index_put_impl_", [CACHE, [], ROWS, [], []], [B, "", B, N, N], 2 * MOVED),
        ("scatter_", [CACHE, [], ROWS, ROWS], [B, N, L, B], 2 * MOVED + 4 * MOVED),
        ("scatter_add_", [CACHE, [], ROWS, ROWS], [B, N, L, B], 3 * MOVED + 4 * MOVED),
        ("index_copy", [CACHE, [], [1], ROWS], [B, N, L, B], 2 * MOVED + 8 + 2 * 8 * 8 * 4096 * 64 * 2),
        ("gather", [[100_000, 64], [], [1, 64]], [F, N, L], 64 * (4 + 8 + 4)),
        ("_embedding_bag", [[100_000, 64], [64], [8]], [F, L, L], (64 + 8) * 64 * 4 + 72 * 8),
    ],
)
def test_placing_and_picking_moves_the_rows_only(name: str, dims: list, types: list[str], moved: float) -> None:
    assert known(f"aten::{name}", dims, types).bytes == moved


def test_picking_along_any_dim() -> None:
    dims, types = [[64, 128, 256], [], [32]], [F, N, L]
    for dim, each in (("0", 128 * 256), ("1", 64 * 256), ("-1", 64 * 128)):
        assert known("aten::index_select", dims, types, ("", dim, "")).bytes == 2 * 32 * each * 4 + 32 * 8
    assert known("aten::index_select", dims, types).bytes == 2 * 32 * 64 * 128 * 4 + 32 * 8  # the least, without a dim


def test_a_subscript_needs_the_shapes_of_its_indices() -> None:
    assert op("aten::index", [[1000, 64], []], [F, ""]) is None
    assert op("aten::index_put_", [[1000, 64], [], []], [F, "", F]) is None, "one value, spread over who knows what"
    found = known("aten::index", [[1000, 64], [[16]]], [F, "TensorList"])
    assert found.bytes_written == 16 * 64 * 4


def test_an_expanded_tensor_is_read_once() -> None:
    dims, types = [[1000, 8, 64], [1000, 8, 64], []], [F, F, N]
    whole = known("aten::copy_", dims, types)
    expanded = known("aten::copy_", dims, types, strides=((512, 64, 1), (64, 0, 1), ()))
    assert whole.bytes_read == 8 * expanded.bytes_read and whole.bytes_written == expanded.bytes_written
    product = known("aten::bmm", [[8, 4, 16], [8, 16, 4]], [B, B], strides=((64, 16, 1), (0, 4, 1)))
    assert product.bytes_read == (8 * 4 * 16 + 16 * 4) * 2 and product.flops == 8 * 2 * 4 * 16 * 4


# --- products


@pytest.mark.parametrize(
    ("name", "dims", "types", "flops"),
    [
        ("aten::_grouped_mm", [[64, 32], [4, 32, 48], [4]], [B, B, INT], 2 * 64 * 32 * 48),
        ("aten::_grouped_mm", [[32, 64], [64, 48], [4]], [B, B, INT], 2 * 64 * 32 * 48),
        ("aten::_grouped_mm", [[4, 16, 32], [32, 64], [4]], [B, B, INT], 2 * 16 * 32 * 64),
        ("aten::_grouped_mm", [[4, 16, 32], [4, 32, 8]], [B, B], 2 * 4 * 16 * 32 * 8),
        ("aten::_cudnn_rnn", [[10, 4, 8], [[64, 8], [64, 16], [64], [64]]], [F, "TensorList"], 2 * 40 * 64 * 24),
        ("aten::_cudnn_rnn_backward", [[10, 4, 8], [[64, 8], [64, 16]]], [F, "TensorList"], 4 * 40 * 64 * 24),
        ("aten::mkldnn_rnn_layer", [[10, 4, 8], [64, 8], [64, 16], [64], [64]], [F] * 5, 2 * 40 * 64 * 24),
        ("aten::addmv_", [[4096], [4096, 64], [64]], [B] * 3, 2 * 4096 * 64),
        ("triton_tem_fused_mm_t_3", [[512, 64], [128, 64], [512, 128]], [B] * 3, 2 * 512 * 64 * 128),
        ("triton_tem_fused_mm_4", [[512, 64], [512, 128], [64, 128]], [B] * 3, 2 * 512 * 64 * 128),
        ("triton_tem_fused_addmm_view_5", [[128], [4, 128, 64], [128, 64], [512, 128]], [B] * 4, 2 * 512 * 64 * 128),
        ("triton_tem_fused_bmm_6", [[3, 8, 16], [3, 4, 16], [3, 8, 4]], [B] * 3, 2 * 3 * 8 * 16 * 4),
    ],
)
def test_products(name: str, dims: list, types: list[str], flops: float) -> None:
    found = known(name, dims, types)
    assert (found.flops, found.kind) == (flops, "matmul")


def test_a_template_that_fits_no_product_has_no_model() -> None:
    assert op("triton_tem_fused_mm_0", [[8, 16], [7, 5], [8, 4]], [B] * 3) is None


def test_transposed_convolutions_count_each_input_once_a_tap() -> None:
    forward = ("", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1")
    dims = [[2, 16, 16, 16], [16, 32, 4, 4], [], [], [], [], [], [], []]
    made = known("aten::convolution", dims, [F, F, ""] + [N] * 6, forward)
    assert made.flops == 2 * 2 * 16 * 16 * 16 * 32 * 16
    assert made.bytes_written == 2 * 32 * 32 * 32 * 4
    backward = ("", "", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1", "[True, True, False]")
    dims = [[2, 32, 32, 32], [2, 16, 16, 16], [16, 32, 4, 4]]
    for concrete in (backward, ()):
        assert known("aten::convolution_backward", dims, [F] * 3, concrete).flops == 2 * made.flops
    weight_only = (*backward[:-1], "[False, True, False]")
    assert known("aten::convolution_backward", dims, [F] * 3, weight_only).flops == made.flops


# --- attention

Q, T, LSE = [2, 4, 64, 16], [2, 64, 4, 16], [2, 4, 64]
FULL = 4 * 2 * 4 * 64 * 64 * 16
HALF = 4 * 2 * 4 * 16 * (64 * 65 // 2)
PACKED = [128, 4, 16]


@pytest.mark.parametrize(
    ("name", "dims", "flag", "value", "flops"),
    [
        ("aten::_efficient_attention_forward", [T, T, T], 9, "1", HALF),
        ("aten::_efficient_attention_forward", [T, T, T], 10, "True", FULL),  # asks for the logsumexp, not for a mask
        ("aten::_efficient_attention_backward", [T, T, T, T, [], T], 14, "0", 2.5 * FULL),
        ("aten::_efficient_attention_backward", [T, T, T, T, [], T], 14, "2", 2.5 * HALF),
        ("aten::_cudnn_attention_forward", [Q, Q, Q], 10, "True", HALF),
        ("aten::_cudnn_attention_backward", [Q] * 5, 14, "True", 2.5 * HALF),
        ("flash_attn::_flash_attn_backward", [T] * 5 + [LSE] + [T] * 3, 11, "True", 2.5 * HALF),
        ("flash_attn_3::fwd", [T] * 3, 24, "True", HALF),
        ("flash_attn_3::bwd", [T] * 5 + [LSE], 16, "False", 2.5 * FULL),
        ("torch_attn::_varlen_attn", [PACKED] * 3 + [[3], [3]], 7, "True", HALF),
        ("torch_attn::_varlen_attn_backward", [PACKED] * 5 + [[4, 128], [3], [3]], 10, "False", 2.5 * FULL),
        ("triton_tem_fused_flex_attention_0", [Q, Q, Q, LSE, Q], 0, "", HALF),
        ("triton_tem_fused_flex_attention_backward_1", [Q, Q, Q, LSE, LSE, Q, Q], 0, "", 2.5 * HALF),
        ("flex_attention_backward", [Q] * 4, 0, "", 2.5 * HALF),
    ],
)
def test_attention_by_any_name(name: str, dims: list, flag: int, value: str, flops: float) -> None:
    concrete = ("",) * flag + (value,)
    found = known(name, dims, [INT if len(d) == 1 else B for d in dims], concrete)
    assert (found.flops, found.kind) == (flops, "attention")


def test_attention_over_cache_pages_has_no_model() -> None:
    pages = [T] * 3 + [[]] * 11 + [[2, 8]]
    assert op("flash_attn_3::fwd", pages, [B] * 3 + [""] * 11 + [INT]) is None


# --- what is not known is not guessed


@pytest.mark.parametrize(
    "name",
    [
        "vllm::unified_attention_with_output",
        "mylib::gemm",
        "mylib::reshape_and_cache_flash",
        "CatBackward0",
        "detach_",
        "aten::_some_new_attention",
        "aten::_weight_int4pack_mm",
        "aten::_new_rnn",
        "aten::linalg_qr",
        "aten::_embedding_bag_sparse_backward",
        "aten::lstm",
        "aten::addbmm",
        "aten::dropout",
    ],
)
def test_no_model_rather_than_a_wrong_one(name: str) -> None:
    assert op(name, [[64, 64], [64, 64]], [B, B]) is None


@pytest.mark.parametrize("name", ["relu_", "gelu", "elu", "sqrt", "rsqrt", "lgamma", "weight_norm", "add", "tril"])
def test_plain_operators_stay_a_pass_over_memory(name: str) -> None:
    assert is_guess(f"aten::{name}")
    assert known(f"aten::{name}", [[64, 64]], [F]).bytes == 2 * 64 * 64 * 4


shapes = st.lists(
    st.one_of(st.lists(st.integers(0, 9), max_size=5), st.lists(st.lists(st.integers(0, 9)), max_size=3)), max_size=6
)


@given(
    name=st.sampled_from(sorted(RULES)),
    dims=shapes,
    numbers=st.lists(st.sampled_from(["", "True", "1", "[2, 2]", "[]", "x", "-9"]), max_size=12),
)
def test_no_arguments_break_a_rule(name: str, dims: list, numbers: list[str]) -> None:
    types = ["TensorList" if d and isinstance(d[0], list) else B for d in dims]
    found = op_of(
        name if "::" in name else f"aten::{name}",
        Signature(
            tuple(tuple(tuple(x) if isinstance(x, list) else x for x in d) for d in dims), tuple(types), tuple(numbers)
        ),
    )
    assert found is None or (found.flops >= 0 and found.bytes >= 0)


def test_fused_kernels_touch_the_rows_they_index() -> None:
    cache = known("triton_poi_fused_index_put_2", [[4096, 64], [4, 64], [4]], [B, B, L])
    assert cache.bytes == 2 * 4 * 64 * 2 + 4 * 8


def test_pooling_and_resizing_write_what_they_make() -> None:
    x = [2, 16, 64, 64]
    pooled = known("aten::max_pool2d_with_indices", [x], [F], ("", "[2, 2]", "[2, 2]"))
    assert pooled.bytes_written == 2 * 16 * 32 * 32 * (4 + 8)
    assert known("aten::upsample_bilinear2d", [x], [F], ("", "[256, 256]")).bytes_written == 2 * 16 * 256 * 256 * 4
    assert known("aten::_adaptive_avg_pool2d", [x], [F], ("", "[1, 1]")).bytes_written == 2 * 16 * 4


def test_serving_kernels_move_the_tokens_they_are_given() -> None:
    new, cache = [8, 2, 64], [4096, 16, 2, 64]
    stored = known("_C_cache_ops::reshape_and_cache_flash", [new, new, cache, cache, [8]], [B, B, B, B, L])
    assert stored.bytes == 4 * 8 * 2 * 64 * 2 + 64
    normed = known("_C::fused_add_rms_norm", [[8, 64], [8, 64], [64], []], [B, B, B, N])
    assert (normed.bytes, normed.kind) == (4 * 8 * 64 * 2 + 128, "norm")
    turned = known("_C::rotary_embedding", [[8], [8, 128], [8, 64], [], [4096, 64], []], [L, B, B, N, B, N])
    assert turned.bytes == 2 * 8 * 192 * 2 + 8 * 8 + 8 * 64 * 2
    assert known("sgl_kernel::silu_and_mul", [[8, 64], [8, 128]], [B, B]).bytes == 8 * 192 * 2


# --- our own kernels


def test_own_attention_with_its_mask() -> None:
    numbers = ("",) * 7 + ("0.25", "0", "0.", "True")
    dims, types = [T, T, T] + [[]] * 8, [B] * 3 + [""] * 8
    assert known("armillary::attention", dims, types, numbers).flops == HALF
    window = ("",) * 7 + ("0.25", "1", "0.", "True")  # each query sees itself
    assert known("armillary::attention", dims, types, window).flops == 4 * 2 * 4 * 16 * 64
    backward = known("armillary::attention_backward", [T, T, LSE, *dims], [B, B, F, *types], ("",) * 3 + numbers)
    assert backward.flops == 2.5 * HALF
    dims, types, numbers = [T, T, T] + [[]] * 4, [B] * 3 + [""] * 4, ("",) * 4 + ("0.25", "1", "True")
    assert known("armillary::window_attention", dims, types, numbers).flops == 4 * 2 * 4 * 16 * 64
    backward = known("armillary::window_attention_backward", [T, T, LSE, *dims], [B, B, F, *types], ("",) * 3 + numbers)
    assert backward.flops == 2.5 * 4 * 2 * 4 * 16 * 64
    documents = [T, T, T, [64]] + [[]] * 7
    assert op("armillary::attention", documents, [B] * 3 + [INT] + [""] * 7, window) is None


def test_own_simplicial_attention_counts_triples() -> None:
    q, kv = [2, 16, 4, 64], [2, 16, 4, 64]
    dims, types, numbers = [q, kv, kv] + [[]] * 4, [B] * 3 + [""] * 4, ("",) * 4 + ("0.125", "2", "4")
    triples = 1 * 1 + 2 * 2 + 2 * 3 + 13 * 2 * 4
    forward = known("armillary::simplicial", dims, types, numbers)
    assert forward.flops == 4 * 2 * 4 * 64 * triples
    lse = [2, 16, 4]
    backward = known("armillary::simplicial_backward", [q, q, lse, *dims], [B, B, F, *types], ("",) * 3 + numbers)
    assert backward.flops == 3 * forward.flops
    documents = [q, kv, kv, [2, 16]] + [[]] * 3
    assert op("armillary::simplicial", documents, [B] * 3 + [INT] + [""] * 3, numbers) is None


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "moved"),
    [
        ("norm", [[8, 64], [], [64], []], (), 2 * 8 * 64 + 64),
        ("norm", [[8, 64], [8, 64], [64], []], (), 4 * 8 * 64 + 64),
        ("activate", [[8, 128]], ("", "silu", "True"), 8 * 128 + 8 * 64),
        ("activate", [[8, 128]], ("", "relu", "False"), 2 * 8 * 128),
        ("activate_backward", [[8, 64], [8, 128]], (), 8 * 64 + 2 * 8 * 128),
        ("rope", [[8, 192], [8, 16], [8, 16]], (), 2 * 8 * 192 + 2 * 8 * 16),
        ("linear_cross_entropy", [[8, 64], [512, 64], [8]], ("",) * 6 + ("True", "True"), 2 * 8 * 512),
        ("small_linear", [[4, 64], [128, 64]], ("",) * 5 + ("True",), 4 * 64 + 128 * 64 + 4 * 64),
        ("fp8_linear", [[4, 64], [128, 64]], (), 1.5 * (4 * 64 + 128 * 64)),
        ("weight_only_linear", [[4, 64], [128, 32], [128, 1]], (), 4 * 64 + 128 * 32 + 128 + 4 * 128),
        ("block_fp8_linear", [[4, 128], [128, 128]], ("",) * 3 + ("False",), 4 * 128 + 128 * 128 + 4 * 128),
        ("fp8_matmul", [[4, 64], [128, 64]], ("",) * 6 + ("False",), 4 * 64 + 128 * 64 + 4 * 128),
    ],
)
def test_own_kernels_move_their_tensors(name: str, dims: list, concrete: tuple[str, ...], moved: float) -> None:
    types = [B if d else "" for d in dims]
    assert known(f"armillary::{name}", dims, types, concrete).bytes == 2 * moved


def test_every_operator_of_ours_has_a_rule_or_a_reason() -> None:
    """A new kernel without a rule would show up as unjudged time in our own profiles."""
    source = Path(armillary.kernels.__file__ or "").parent
    names = {name for file in source.rglob("*.py") for name in re.findall(r'"(armillary::\w+)"', file.read_text())}
    assert len(names) > 10
    ragged = {"armillary::paged_attention", "armillary::latent_decode", "armillary::latent_prefill"}
    assert names - set(RULES) <= ragged  # the lengths of their sequences are not in a trace


def test_products_of_experts_count_their_rows_once() -> None:
    rows, experts, n, k = 96, 4, 64, 32
    forward = known("armillary::grouped_linear", [[rows, k], [experts, n, k], [experts]], [B, B, INT])
    assert forward.flops == 2 * rows * n * k
    dims = [[rows, n], [rows, k], [experts, n, k], [experts], [], []]
    both, dx = (
        known("armillary::grouped_linear_backward", dims, [B, B, B, INT, N, N], ("",) * 4 + flags)
        for flags in (("True", "True"), ("True", "False"))
    )
    assert both.flops == 2 * dx.flops == 2 * forward.flops
    assert dx.bytes == 2 * (rows * n + experts * n * k + rows * k)
