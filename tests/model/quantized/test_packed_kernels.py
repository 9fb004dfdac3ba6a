"""Packed layers with kernels against the same layers in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.model.quantized import packed_kernels
from armillary.model.quantized.formats import Fp4, Fp8, IntGroups, pack_nibbles
from armillary.model.quantized.packed_kernels import PackedKernel, for_kernels
from armillary.model.quantized.packed_linear import PackedEmbedding, PackedLinear
from armillary.model.quantized.packed_rows import FusedRows, PackedRows, plain
from tests.kernels.interpreter import needs_interpreter

N, K = 24, 256


def int4(*, zeros: bool, act_order: bool = False, group: int = 128, rows: int = N, columns: int = K) -> PackedRows:
    groups = -(-columns // group)
    tensors: dict[str, Any] = {
        "codes": pack_nibbles(torch.randint(0, 16, (rows, columns), dtype=torch.uint8)),
        "scale": (torch.rand(rows, groups) / 50).half(),
    }
    if zeros:
        tensors["zero"] = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    order = torch.randperm(columns) if act_order else None
    return PackedRows(format=IntGroups(bits=4, group=group, zeros=zeros), rows=tensors, columns=columns, order_K=order)


def int8() -> PackedRows:
    rows = {"codes": torch.randint(0, 256, (N, K), dtype=torch.uint8), "scale": torch.rand(N, 1) / 900}
    return PackedRows(format=IntGroups(bits=8, group=K, zeros=False), rows=rows, columns=K)


def fp8_blocks() -> PackedRows:
    codes = torch.randn(N, K).to(torch.float8_e4m3fn).view(torch.uint8)
    return PackedRows(format=Fp8(group=128), rows={"codes": codes, "scale": torch.rand(N, 2) / 9}, columns=K)


def nvfp4() -> PackedRows:
    scale = (torch.rand(N, K // 16) * 400).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    rows = {"codes": codes, "scale": scale, "divisor": torch.full((N, 1), 9000.0)}
    return PackedRows(format=Fp4(group=16, powers=False), rows=rows, columns=K)


def mxfp4() -> PackedRows:
    rows = {
        "codes": torch.randint(0, 256, (N, K // 2), dtype=torch.uint8),
        "scale": torch.randint(116, 121, (N, K // 32), dtype=torch.uint8),
    }
    return PackedRows(format=Fp4(group=32, powers=True), rows=rows, columns=K)


PARTS = {
    "int4": lambda: int4(zeros=False),
    "int4, zeros, act-order": lambda: int4(zeros=True, act_order=True),
    "int8": int8,
    "fp8 blocks": fp8_blocks,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
}


@pytest.mark.parametrize("name", PARTS)
def test_the_order_of_the_kernels_changes_no_number(name: str) -> None:
    part = PARTS[name]()
    words = for_kernels(part)
    assert torch.equal(words.dequantised(), part.dequantised()) and words.nbytes == part.nbytes
    assert torch.equal(for_kernels(words).dequantised(), part.dequantised())


@pytest.fixture
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU plain torch is chosen; here the kernels are, which the interpreter runs."""
    from armillary.kernels.quantized.weight_only_triton import weight_only_linear

    monkeypatch.setattr(packed_kernels, "_chosen", lambda case: weight_only_linear)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@needs_interpreter
@pytest.mark.parametrize("name", ["int4, zeros, act-order", "fp8 blocks", "nvfp4"])
def test_a_layer_with_kernels_agrees_with_plain_torch(name: str, kernels_on_a_cpu: None) -> None:
    torch.manual_seed(3)
    packed, bias = PARTS[name](), torch.randn(2 * N).bfloat16()
    weight = FusedRows(parts=(packed, plain(torch.randn(N, K).bfloat16())), order_N=torch.randperm(2 * N).int())
    slow, fast = PackedLinear(weight, bias), PackedLinear(weight, bias)
    fast.use_kernels(torch.bfloat16)
    assert isinstance(fast.kernels[0], PackedKernel) and fast.kernels[1] is None
    with torch.inference_mode():
        for tokens in (1, 2, 65):
            x = torch.randn(tokens, K).bfloat16()
            assert error(fast(x), slow(x)) < 1e-2
        assert fast(x[:0]).shape == (0, 2 * N)


@needs_interpreter
def test_an_embedding_whose_head_has_kernels_looks_rows_up_as_before(kernels_on_a_cpu: None) -> None:
    part, tokens = int4(zeros=True), torch.tensor([[3, 0], [N - 1, 3]])
    embedding = PackedEmbedding(part, torch.bfloat16)
    before = embedding(tokens)
    embedding.linear.use_kernels(torch.bfloat16)
    assert embedding.linear.weight.parts[0].rows["codes"].dtype == torch.int32
    assert torch.equal(embedding(tokens), before)


@needs_interpreter
@pytest.mark.parametrize(
    "part",
    [int4(zeros=False, group=96), int4(zeros=False, columns=96, group=32), plain(torch.randn(4, 128))],
    ids=["group", "columns", "plain"],
)
def test_what_kernels_do_not_take_stays_as_it_is(part: PackedRows, kernels_on_a_cpu: None) -> None:
    linear = PackedLinear(FusedRows(parts=(part,)))
    linear.use_kernels(torch.bfloat16)
    assert linear.kernels == (None,) and linear.weight.parts == (part,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTS)
def test_a_layer_on_a_gpu_and_in_a_graph(name: str) -> None:
    part = PARTS[name]().to(torch.device("cuda"))
    slow, fast = (PackedLinear(FusedRows(parts=(part,))) for _ in range(2))
    fast.use_kernels(torch.bfloat16)
    assert fast.kernels[0] is not None
    with torch.inference_mode():
        for tokens in (1, 8, 64, 65):
            x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
            assert error(fast(x), slow(x)) < 1e-2
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = fast(x)
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert error(y, slow(x)) < 1e-2


def test_plain_torch_runs_where_no_kernel_is_chosen() -> None:
    part = int4(zeros=False)
    assert PackedKernel.of(part, torch.float32) is None
    if not torch.cuda.is_available():
        assert PackedKernel.of(part, torch.bfloat16) is None


def test_a_weight_that_is_let_go_has_no_kernels() -> None:
    linear = PackedLinear(FusedRows(parts=(int4(zeros=False),)))
    linear.free()
    assert linear.kernels == () and not linear.weight.parts
