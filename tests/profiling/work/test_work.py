"""FLOPs and bytes from names and shapes."""

from __future__ import annotations

import pytest

from armillary.profiling.trace.trace import Signature
from armillary.profiling.work.work import op_of

B = "c10::BFloat16"


def work(name: str, *dims: object, types: str = "float", concrete: tuple[str, ...] = ()) -> tuple[float, float, str]:
    op = op_of(name, Signature(tuple(dims), (types,) * len(dims), concrete))
    assert op is not None
    return op.flops, op.bytes, op.kind


@pytest.mark.parametrize(
    ("name", "dims", "flops", "moved", "kind"),
    [
        ("aten::mm", ((4, 8), (8, 2)), 128, 4 * (32 + 16 + 8), "matmul"),
        ("aten::addmm", ((2,), (4, 8), (8, 2)), 128, 4 * (32 + 16 + 8), "matmul"),
        ("aten::bmm", ((3, 4, 8), (3, 8, 2)), 384, 12 * (32 + 16 + 8), "matmul"),
        ("aten::linear", ((5, 4, 8), (2, 8), (2,)), 640, 4 * (160 + 16 + 40), "matmul"),
        ("aten::add", ((10, 10), (10,)), 100, 4 * (100 + 10 + 100), "elementwise"),
        ("aten::copy_", ((10, 10), (10, 10)), 0, 800, "copy"),
        ("aten::fill_", ((10, 10), ()), 0, 400, "copy"),
        ("aten::sum", ((10, 10),), 100, 404, "reduction"),
        ("aten::_softmax", ((10, 10),), 500, 800, "softmax"),
        ("aten::embedding", ((1000, 16), (4,)), 0, 4 * 16 * 8 + 32, "embedding"),
        ("aten::cat", (((4, 4), (4, 4)),), 0, 256, "copy"),
        ("aten::_foreach_add_", (((8,), (8,)), ((8,), (8,))), 32, 192, "optimizer"),
        ("aten::_fused_adamw_", (((8,),), ((8,),), ((8,),), ((8,),)), 120, 32 * 4 + 32 * 3, "optimizer"),
        ("aten::native_batch_norm", ((2, 4, 8),), 448, 512, "norm"),
        ("aten::unheard_of", ((10, 10),), 100, 800, "elementwise"),
        ("aten::topk", ((10, 10),), 100, 404, "reduction"),
        ("aten::zeros_like", ((10, 10),), 0, 400, "copy"),
    ],
)
def test_models(name: str, dims: tuple, flops: float, moved: float, kind: str) -> None:
    assert work(name, *dims) == (flops, moved, kind)


def test_attention_forward_backward_and_packed() -> None:
    shape = (2, 4, 8, 16)
    name = "aten::_scaled_dot_product_flash_attention"
    forward = work(name, shape, shape, shape, (), (), concrete=("", "", "", "0.", "False"), types=B)[0]
    assert forward == 2 * 2 * 4 * 32 * 64
    causal = work(name, shape, shape, shape, (), (), concrete=("", "", "", "0.", "True"), types=B)[0]
    assert causal == 2 * 2 * 4 * 32 * 36
    backward = work(f"{name}_backward", *(shape,) * 5, concrete=("",) * 11 + ("False",), types=B)[0]
    assert backward == 2.5 * forward
    packed = work("aten::_flash_attention_forward", (16, 4, 16), (16, 4, 16), (16, 4, 16), (3,), (3,), types=B)[0]
    assert packed == forward


def test_what_does_no_work_or_is_not_known() -> None:
    assert op_of("aten::mm", None) is None
    assert op_of("aten::cudnn_convolution", Signature(((1, 2, 3, 3), (1, 2, 1, 1)), ("float", "float"))) is None
    assert op_of("aten::zeros", Signature(((),), ("ScalarList",))) is None


def test_fused_kernels() -> None:
    assert work("triton_poi_fused_add_0", (8, 8), (8, 8), (8, 8), types=B)[1] == 3 * 128
    assert work("triton_tem_fused_mm_0", (8, 16), (16, 4), (8, 4), types=B)[0] == 2 * 8 * 16 * 4
    assert work("triton_poi_fused_embedding_0", (1000, 8), (4, 8), (4,), types=B)[1] == 2 * 32 + 8
