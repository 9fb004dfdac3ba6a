"""Which operator's model stands for a kernel, and what the kernel's own name and time say of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.profiling.analysis.analyse import analyse
from armillary.profiling.profile import Profile, Row
from armillary.profiling.trace.event_classes import element_size, host_state, is_plain_fp32, kernel_work
from tests.profiling.traces import ROOFLINE, HandMade

B = "c10::BFloat16"
BIG = [4096, 16_384]  # 268 MB of fp32: beyond any cache


@pytest.fixture
def profiled(tmp_path: Path):
    def run(made: HandMade) -> Profile:
        profile = analyse(made.write(tmp_path / "trace.json"), roofline=ROOFLINE)
        assert sum(profile.budget.values()) == pytest.approx(profile.wall_s, rel=1e-9)
        return profile

    return run


def kernel(profile: Profile) -> Row:
    (row,) = profile.kernels
    return row


def operator(profile: Profile, name: str) -> Row:
    return next(row for row in profile.operators if row.name == name)


def given(made: HandMade, name: str, at: float, takes: float, dims: list, types: list[str], numbers: list[str]) -> None:
    made.add("cpu_op", name, at, takes, **{"Input Dims": dims, "Input type": types, "Concrete Inputs": numbers})


# --- who does the work


def test_an_unknown_part_of_attention_is_attention(profiled) -> None:
    """2·2·4·64² · 16 FLOPs a head; the inner operator would read as one pass over memory."""
    q, made = [2, 4, 64, 16], HandMade().step(200)
    numbers = ["", "", "", "", "True", "0.", "False", "False", ""]
    given(made, "aten::_scaled_dot_product_cudnn_attention", 0, 30, [q, q, q] + [[]] * 6, [B] * 3 + [""] * 6, numbers)
    made.op("aten::_some_fused_kernel", 5, 20, q, q, q, dtype=B)
    profile = profiled(made.kernel("cudnn_generated_fort_native_sdpa", launched=10, at=40, takes=100))
    assert (kernel(profile).work, kernel(profile).flops) == ("attention", 4 * 2 * 4 * 64 * 64 * 16)
    outer = operator(profile, "aten::_scaled_dot_product_cudnn_attention")
    assert outer.device_s == pytest.approx(100e-6)


def test_a_product_handed_on_is_counted_once(profiled) -> None:
    made = HandMade().step(200).op("aten::mv", 0, 30, [512, 512], [512])
    made.op("aten::addmv_", 5, 20, [512], [512, 512], [512])
    profile = profiled(made.kernel("gemv2T_kernel_val", launched=10, at=40, takes=100))
    assert (kernel(profile).work, kernel(profile).flops) == ("gemm", 2 * 512 * 512)
    assert operator(profile, "aten::mv").flops is None


def test_a_bias_beside_a_convolution_is_work_of_its_own(profiled) -> None:
    made = HandMade().step(500)
    numbers = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
    dims = [[8, 64, 32, 32], [64, 64, 1, 1], [64]] + [[]] * 6
    given(made, "aten::convolution", 0, 60, dims, ["float"] * 3 + ["Scalar"] * 6, numbers)
    made.kernel("implicit_convolve_sgemm", launched=5, at=70, takes=200)
    made.op("aten::add_", 30, 20, [8, 64, 32, 32], [1, 64, 1, 1])
    made.kernel("vectorized_elementwise_kernel", launched=35, at=270, takes=100)
    rows = {row.name: row for row in profiled(made).kernels}
    assert rows["implicit_convolve_sgemm"].flops == 2 * 8 * 64 * 32 * 32 * 64
    assert rows["vectorized_elementwise_kernel"].work == "elementwise"
    assert rows["vectorized_elementwise_kernel"].bytes == pytest.approx((2 * 8 * 64 * 32 * 32 + 64) * 4)


def test_many_small_products_take_the_work_from_the_one_around_them(profiled) -> None:
    """Grouped products on a CPU: sixteen experts, each far less than the whole."""
    made = HandMade().step(1000)
    given(made, "aten::_grouped_mm", 0, 900, [[256, 64], [16, 64, 64], [16]], [B, B, "int"], ["", "", ""])
    for i in range(16):
        made.op("aten::mm", 10 + 50 * i, 40, [16, 64], [64, 64], dtype=B)
    profile = profiled(made)
    assert operator(profile, "aten::mm").flops == 2 * 256 * 64 * 64
    assert operator(profile, "aten::_grouped_mm").flops is None


def test_the_sums_inside_a_norm_are_the_norm(profiled) -> None:
    x = [256, 512]
    made = HandMade().step(1000).op("aten::_fused_rms_norm", 0, 900, x)
    made.op("aten::pow", 10, 200, x).op("aten::sum", 300, 200, x).op("aten::mul", 600, 200, x)
    profile = profiled(made)
    assert operator(profile, "aten::_fused_rms_norm").device_s == pytest.approx(900e-6)
    assert operator(profile, "aten::pow").bytes is None and operator(profile, "aten::sum").bytes is None


def test_an_operator_that_launches_nothing_has_no_work_on_a_gpu(profiled) -> None:
    made = HandMade().step(300).op("aten::gelu", 0, 20, [64, 64]).op("aten::mm", 30, 20, [1000, 1000], [1000, 1000])
    profile = profiled(made.kernel("sgemm", launched=35, at=60, takes=220))
    row = operator(profile, "aten::gelu")
    assert row.bytes is None and row.roofline_s is None and row.bound == "unknown"


# --- what the device says


def test_a_model_beyond_the_device_is_not_called_useful(profiled) -> None:
    """537 MB need 537 µs at 1 TB/s. In 600 it is 90 % of the roofline; in 20 the model is wrong."""
    for takes, attribution in ((600, True), (20, False)):
        made = HandMade().step(1000).op("aten::gelu", 0, 20, BIG)
        profile = profiled(made.kernel("vectorized_elementwise_kernel", launched=5, at=30, takes=takes))
        assert (kernel(profile).bytes is not None) == attribution
        assert profile.budget["unjudged"] * 1e6 == pytest.approx(0 if attribution else takes)
        assert operator(profile, "aten::gelu").bytes == kernel(profile).bytes


def test_a_small_tensor_may_sit_in_a_cache(profiled) -> None:
    """8.4 MB in 4 µs is twice the memory's bandwidth: a cache, and capped; in 1 µs it is eight times, and no cache."""
    for takes, attribution in ((4, True), (1, False)):
        made = HandMade().step(100).op("aten::gelu", 0, 20, [1024, 1024])
        profile = profiled(made.kernel("vectorized_elementwise_kernel", launched=5, at=30, takes=takes))
        assert (kernel(profile).bytes is not None) == attribution
        assert profile.budget["useful"] * 1e6 == pytest.approx(takes if attribution else 0)


def test_a_product_beyond_the_peak_has_no_model(profiled) -> None:
    """2·1000³ FLOPs at 10 TFLOP/s need 200 µs."""
    for takes, attribution in ((180, True), (50, False)):
        made = HandMade().step(500).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
        profile = profiled(made.kernel("sgemm", launched=2, at=100, takes=takes))
        assert (kernel(profile).flops is not None) == attribution and kernel(profile).work == "gemm"


def test_the_same_on_a_cpu_where_caches_have_no_bound(profiled) -> None:
    """Half a gigabyte cannot pass in 50 µs; eight megabytes may, from a cache."""
    for shape, attribution in ((BIG, False), ([1024, 1024], True)):
        profile = profiled(HandMade().step(100).op("aten::gelu", 0, 50, shape))
        assert (operator(profile, "aten::gelu").bytes is not None) == attribution


def test_sizes_no_tensor_has_are_not_believed(profiled) -> None:
    for size in (10**400, -5):
        made = HandMade().step(100).op("aten::mm", 0, 50, [size, 8], [8, size])
        given(made, "aten::cat", 60, 20, [[[size, 8], [8, 8]]], ["TensorList"], [""])
        profile = profiled(made)
        assert operator(profile, "aten::mm").flops is None
        assert operator(profile, "aten::cat").bytes == 2 * 8 * 8 * 4


def test_a_graphs_kernel_is_not_given_impossible_work(profiled) -> None:
    made = HandMade().step(2000).op("aten::gelu", 0, 20, BIG)
    made.kernel("vectorized", launched=5, at=30, takes=600, grid=[8, 1, 1])
    made.kernel("vectorized", launched=700, at=710, takes=10, call="cudaGraphLaunch", grid=[8, 1, 1])
    profile = profiled(made)
    assert profile.budget["unjudged"] * 1e6 == pytest.approx(10)


def test_an_operator_is_no_pass_over_memory_where_its_kernel_is_a_product(profiled) -> None:
    made = HandMade().step(200).op("aten::mystery", 0, 20, [64, 64], [64, 64])
    profile = profiled(made.kernel("ampere_sgemm_64x64_nn", launched=5, at=30, takes=100))
    assert (kernel(profile).work, kernel(profile).bytes) == ("gemm", None)
    assert operator(profile, "aten::mystery").work != "elementwise"


CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<{}, unsigned int, 4, 64, 64>({}*)"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<{}, 4, false>, float>"
)


@pytest.mark.parametrize(
    ("held", "size"),
    [
        ("c10::BFloat16", 2),
        ("c10::Half", 2),
        ("float", 4),
        ("double", 8),
        ("at::native::(anonymous namespace)::OpaqueType<2u>", 2),
        ("at::native::(anonymous namespace)::OpaqueType<8u>", 8),
    ],
)
def test_a_kernels_template_says_what_a_list_holds(profiled, held: str, size: int) -> None:
    assert element_size(CAT.format(held, held)) == element_size(ADAM.format(held)) == size
    shape = [64, 1024]
    for name, lists, kernel_name, passes in (
        ("aten::cat", [[shape, shape]], CAT.format(held, held), 4),
        ("aten::_fused_adamw_", [[shape]] * 4, ADAM.format(held), 7),
    ):
        made = HandMade().step(200)
        given(made, name, 0, 20, lists, ["TensorList"] * len(lists), [""] * len(lists))
        profile = profiled(made.kernel(kernel_name, launched=5, at=30, takes=100))
        assert kernel(profile).bytes == operator(profile, name).bytes == passes * 64 * 1024 * size


def test_lists_on_a_cpu_hold_what_most_tensors_do(profiled) -> None:
    made = HandMade().step(400).op("aten::gelu", 0, 100, [512, 512], dtype=B)
    given(made, "aten::cat", 150, 200, [[[512, 512], [512, 512]]], ["TensorList"], [""])
    assert operator(profiled(made), "aten::cat").bytes == 4 * 512 * 512 * 2


def test_strides_of_an_expanded_tensor_are_read_from_the_trace(profiled) -> None:
    made = HandMade().step(400)
    dims, strides = [[64, 8, 64], [64, 8, 64], []], [[512, 64, 1], [64, 0, 1], []]
    args = {"Input Dims": dims, "Input type": ["float", "float", "Scalar"], "Input Strides": strides}
    made.add("cpu_op", "aten::copy_", 0, 100, **args)
    assert operator(profiled(made), "aten::copy_").bytes == 9 * 64 * 64 * 4


def test_compiled_cpu_code_is_elementwise_and_unjudged(profiled) -> None:
    """Inductor's loops leave no event and no shapes; the products inside the region are told apart."""
    made = HandMade().step(1000)
    made.add("user_annotation", "Torch-Compiled Region: 0/0", 0, 900)
    made.add("user_annotation", "## Call CompiledFxGraph fabc ##", 10, 880)
    made.op("aten::addmm", 100, 300, [64], [64, 64], [64, 64])
    profile = profiled(made)
    region = operator(profile, "## Call CompiledFxGraph fabc ##")
    assert (region.work, region.flops) == ("elementwise", None)
    assert region.device_s == pytest.approx(580e-6)
    assert operator(profile, "aten::addmm").flops == 2 * 64**3
    assert profile.budget["unjudged"] * 1e6 == pytest.approx(580, abs=20)


# --- names


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("hipMemcpyWithStream", "sync"),
        ("hipMemcpy", "sync"),
        ("hipMemcpyDtoH", "sync"),
        ("cudaMemcpy", "sync"),
        ("cudaMemcpy2D", "sync"),
        ("cuMemcpyDtoH_v2", "sync"),
        ("cuMemcpyHtoD_v2", "sync"),
        ("cudaDeviceSynchronize", "sync"),
        ("hipEventSynchronize", "sync"),
        ("zeEventHostSynchronize", "sync"),
        ("cuMemcpyDtoHAsync_v2", "launch"),
        ("cuMemcpyHtoDAsync_v2", "launch"),
        ("cuMemcpyDtoDAsync_v2", "launch"),
        ("cudaMemcpyAsync", "launch"),
        ("hipMemcpyAsync", "launch"),
        ("cudaMemcpyToSymbolAsync", "launch"),
        ("cuMemcpyDtoD_v2", "launch"),
        ("cuLaunchKernel", "launch"),
        ("cudaMemcpyBatchAsync", "launch"),
    ],
)
def test_calls_that_wait(name: str, state: str) -> None:
    assert host_state(name, "runtime") == state


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("volta_sgemm_128x64_tn", True),
        ("ampere_sgemm_32x32_sliced1x4_nn", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4", True),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>", True),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false>", True),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", True),
        ("cudnn_infer_volta_scudnn_128x64_3dconv_fprop_medium_nn_v1", True),
        ("implicit_convolve_sgemm<float, float, 1024>", True),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_SN", True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_tensor16x8x8", False),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nt_align4>(Params)", False),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x64_16x6>", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", False),
        ("nvjet_tst_64x64_64x16_2x1", False),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT320x224x64", False),
    ],
)
def test_products_outside_the_matrix_units(name: str, plain: bool) -> None:
    assert is_plain_fp32(name) == plain


def test_classes_by_name() -> None:
    assert kernel_work("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>") == "copy"
    assert kernel_work("void flash_fwd_kernel<Flash_fwd_kernel_traits>") == "attention"
    assert kernel_work("aten::mv") == "gemm" and kernel_work("aten::movedim") == "other"


def test_plain_fp32_lowers_the_roof_of_the_operator_too(tmp_path: Path) -> None:
    made = HandMade().step(500).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    made.kernel("volta_sgemm_128x64_tn", launched=2, at=100, takes=400)
    roofline = replace(ROOFLINE, flops={"fp32": 1e13, "tf32": 8e13})
    profile = analyse(made.write(tmp_path / "trace.json"), roofline=roofline)
    assert kernel(profile).roofline_fraction == operator(profile, "aten::mm").roofline_fraction == pytest.approx(0.5)
