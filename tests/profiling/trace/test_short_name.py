"""Kernel names are cut to what a person needs."""

from __future__ import annotations

import pytest

from armillary.profiling.trace.event_classes import short_name

MUL = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&)>"
)
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::x>"
SUM = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::sum_functor<float, float>>>"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (MUL, "elementwise_kernel (MulFunctor)"),
        (COPY, "unrolled_elementwise_kernel (direct_copy_kernel_cuda)"),
        (SUM, "reduce_kernel (sum_functor)"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>, false>(Flash_fwd_params)", "flash_fwd_kernel"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        ("aten::mm", "aten::mm"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("x" * 100, "x" * 69 + "…"),
    ],
)
def test_names(name: str, short: str) -> None:
    assert short_name(name) == short
