"""fp8 keys and values of a cache for tensor cores: converted to fp16, which holds every fp8 number, and bf16 queries
except values that attention never has.

The conversion to bf16 is slow. Values need a transpose before the tensor cores, which the hardware does for pairs of
bytes but not for single bytes: two neighbours stay together until they are in registers, and even and odd dims are
multiplied separately.
"""

import triton
import triton.language as tl


@triton.jit
def in_fp16(x):
    """From bf16; values beyond fp16's range become its largest, and NaN stays."""
    if x.dtype == tl.float16:
        return x
    return tl.inline_asm_elementwise(
        "{ .reg .b32 low, high; shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000;"
        " cvt.rn.satfinite.f16x2.f32 $0, high, low; }",
        "=r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def loaded_pairs(values, at, D: tl.constexpr):
    """[N, D / 2] pairs of neighbours, of rows at positions `at`, multiples of 16."""
    rows = (values + at[:, None]).to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(rows + tl.arange(0, D // 2)[None, :])


@triton.jit
def absorbed_pairs(sums, weights, rescale, value_pairs):
    """Weighted values, of even and of odd dims, with one more tile."""
    even, odd = _apart(value_pairs)
    weights, rescale = weights.to(tl.float16), rescale[:, None]
    return tl.dot(weights, even, sums[0] * rescale), tl.dot(weights, odd, sums[1] * rescale)


@triton.jit
def _apart(value_pairs):
    """The even and the odd elements, in fp16."""
    both = tl.inline_asm_elementwise(
        "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [value_pairs], dtype=tl.int32, is_pure=True, pack=1
    )
    return both.to(tl.int16).to(tl.float16, bitcast=True), (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def whole_of(sums, PAIRS: tl.constexpr):
    """[M, D] from even and odd dims."""
    if PAIRS:
        return tl.reshape(tl.join(sums[0], sums[1]), [sums[0].shape[0], 2 * sums[0].shape[1]])
    else:
        return sums[0]
