"""What kernels over packed weights share in Triton: scales and fp4 codes as numbers, scales of groups, sums of rows."""

import triton
import triton.language as tl

# N rows, G scales per row


@triton.jit
def scale_number(scale, KIND: tl.constexpr):
    """Scales as fp32; those of mxfp4 are exponents with bias 127."""
    if KIND == "mxfp4":
        exponent = scale.to(tl.int32)
        # the smallest is subnormal
        return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    elif KIND == "nvfp4":
        return scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return scale.to(tl.float32)


@triton.jit
def load_groups(pointer, row, column, columns, G, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Scales or zeros of rows at these columns."""
    at = row[:, None] * G + (column // GROUP)[None, :]
    if EVEN:
        return tl.load(pointer + at)
    else:
        return tl.load(pointer + at, mask=column[None, :] < columns, other=0)


@triton.jit
def moved(w, LEFT: tl.constexpr):
    """Words shifted left, or right where LEFT is negative."""
    if LEFT > 0:
        return w << LEFT
    elif LEFT < 0:
        return w >> -LEFT
    else:
        return w


@triton.jit
def fp4_number(w, PLACE: tl.constexpr):
    """The E2M1 code at the nibble PLACE as fp32: its bits moved to where fp32 has them, which divides by 2^126."""
    bits = moved(w, 22 - 4 * PLACE)
    number = ((bits & 0x1C00000) | ((bits & 0x2000000) << 6)).to(tl.float32, bitcast=True)
    return number * 8.507059173023462e37


@triton.jit
def store_rows(total, scale_ptr, zero_ptr, out_ptr, n, row, N, KIND: tl.constexpr, BY_ROW: tl.constexpr):
    if BY_ROW:
        total *= scale_number(tl.load(scale_ptr + row), KIND)
    if KIND == "nvfp4":
        total /= tl.load(zero_ptr + row)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
