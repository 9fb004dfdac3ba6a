"""Packed layers with kernels against the same layers in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from armillary.kernels.core.op import find_op
from armillary.kernels.quantized import weight_only
from armillary.model.quantized import fp8_tensor_cores, packed_kernels
from armillary.model.quantized.formats import Fp4, Fp8, Int8Rows, IntGroups, Lookup4Bit, pack_nibbles
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantized.kernel_order import for_kernels, kernel_format
from armillary.model.quantized.packed_kernels import PackedKernel
from armillary.model.quantized.packed_linear import PackedEmbedding, PackedLinear
from armillary.model.quantized.packed_rows import FusedRows, PackedRows, plain
from armillary.store.gguf.gguf_header import BLOCKS
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


def gguf(kind: str, rows: int = N, width: int = K, *, largest: float = 1 / 900) -> PackedRows:
    """Random blocks, their fp16 numbers up to `largest`."""
    columns, size = BLOCKS[kind]
    blocks = torch.randint(0, 256, (rows * width // columns, size), dtype=torch.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for at in halves:
        blocks[:, at : at + 2] = (torch.rand(len(blocks), 1) * largest).half().view(torch.uint8)
    return PackedRows(format=GgufBlocks(kind=kind), rows={"blocks": blocks.view(rows, -1)}, columns=width)


def nf4(num_rows: int = N, columns: int = K, *, nested: bool = False) -> PackedRows:
    rows = {
        "codes": torch.randint(0, 256, (num_rows, columns // 2), dtype=torch.uint8),
        "maximum": torch.rand(num_rows, columns // 64) / 9,
    }
    table, second = tuple(torch.linspace(-1, 1, 16).tolist()), tuple(torch.linspace(0, 1, 256).tolist())
    if not nested:
        return PackedRows(format=Lookup4Bit(block=64, table=table), rows=rows, columns=columns)
    rows["maximum"] = torch.randint(1, 256, (N, K // 64), dtype=torch.uint8)
    rows |= {"first": torch.zeros(N, 1, dtype=torch.int32), "nested_maximum": torch.rand(N, 1) / 9}
    nested_format = Lookup4Bit(block=64, table=table, nested_block=256, nested_offset=0.1, nested_table=second)
    return PackedRows(format=nested_format, rows=rows, columns=K)


def llm_int8() -> PackedRows:
    rows = {"codes": torch.randint(0, 256, (N, K), dtype=torch.uint8), "maximum": torch.rand(N, 1) / 9}
    return PackedRows(format=Int8Rows(), rows=rows, columns=K)


PARTS = {
    **{kind: partial(gguf, kind) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")},
    "nf4": nf4,
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
    assert words is not None and torch.equal(words.dequantised(), part.dequantised())
    assert kernel_format(words) == kernel_format(part)
    assert words.nbytes <= (1.03 if name in ("Q4_K", "Q5_K") else 1) * part.nbytes
    again = for_kernels(words)
    assert again is not None and torch.equal(again.dequantised(), part.dequantised())
    some = torch.tensor([5, 0])
    assert torch.equal(words.select(some).dequantised(), part.dequantised()[some])


@pytest.mark.parametrize("part", [nf4(nested=True), llm_int8()], ids=["nested", "llm.int8"])
def test_scales_that_are_made_anew_are_right_to_their_digits(part: PackedRows) -> None:
    words = for_kernels(part)
    assert words is not None and error(words.dequantised(), part.dequantised()) < 4e-4
    assert words.nbytes <= 1.05 * part.nbytes


def test_nested_maxima_that_fp16_does_not_hold_stay() -> None:
    part = nf4(nested=True)
    part.rows["nested_maximum"] *= 1e9
    assert for_kernels(part) is None


@pytest.fixture
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU plain torch is chosen; here the kernels are, which the interpreter runs."""
    from armillary.kernels.quantized.weight_only_triton import weight_only_linear

    monkeypatch.setattr(packed_kernels, "_chosen", lambda case: weight_only_linear)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@needs_interpreter
@pytest.mark.parametrize("name", ["int4, zeros, act-order", "fp8 blocks", "nvfp4", "Q4_0", "Q5_K", "nf4"])
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


@pytest.mark.parametrize("group", [128, K])
@torch.inference_mode()
def test_many_tokens_meet_fp8_units_where_the_checkpoint_rounds_inputs(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by the definition of those products; a few tokens stay as they are."""
    monkeypatch.setattr(packed_kernels, "_chosen", lambda case: other_reference)
    monkeypatch.setattr(fp8_tensor_cores, "_chosen", lambda op, case: find_op(op).reference)
    rows = fp8_blocks().rows if group == 128 else {**fp8_blocks().rows, "scale": torch.rand(N, 1) / 9}
    x = torch.randn(65, K).bfloat16()
    for activations in (False, True):
        part = PackedRows(format=Fp8(group=group, fp8_activations=activations), rows=rows, columns=K)
        linear, plainly = (PackedLinear(FusedRows(parts=(part,))) for _ in range(2))
        linear.use_kernels(torch.bfloat16)
        assert error(linear(x[:64]), plainly(x[:64])) < 1e-3
        off = error(linear(x), plainly(x))
        assert 5e-3 < off < 5e-2 if activations else off < 1e-3


def other_reference(*arguments: Any) -> torch.Tensor:
    return weight_only.reference(*arguments)


def test_plain_torch_runs_where_no_kernel_is_chosen() -> None:
    part = int4(zeros=False)
    assert PackedKernel.of(part, torch.float32) is None
    if not torch.cuda.is_available():
        assert PackedKernel.of(part, torch.bfloat16) is None


def test_a_weight_that_is_let_go_has_no_kernels() -> None:
    linear = PackedLinear(FusedRows(parts=(int4(zeros=False),)))
    linear.free()
    assert linear.kernels == () and not linear.weight.parts
