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
def fp4_pair(w, J: tl.constexpr):
    """The E2M1 codes at the nibbles J and J + 4 as fp32, divided by 2^14: their bits moved to where fp16 has them."""
    bits = moved(w, 12 - 4 * J)
    both = (bits & -2147450880) | ((bits >> 3) & 0x0E000E00)
    low, high = both.to(tl.int16), (both >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def finish_rows(
    total,
    squares,
    residual,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    row,
    N,
    K,
    eps,
    KIND: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store sums of ROWS rows, after the scale of whole rows, the norm (`squares` of x), bias, gate and residual."""
    if BY_ROW:
        total *= scale_number(tl.load(scale_ptr + row), KIND)
    if KIND == "nvfp4":
        total /= tl.load(zero_ptr + row)
    if HAS_NORM:
        total *= tl.rsqrt(squares / K + eps)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row).to(tl.float32)
    if GATED:  # plain torch rounds the GEMM's result before the activation; so does this
        gate, up = tl.split(tl.reshape(total.to(out_ptr.dtype.element_ty).to(tl.float32), [ROWS // 2, 2]))
        total = gate * tl.sigmoid(gate) * up
    at, width = places(N, GATED, ROWS)
    tl.store(out_ptr + at, (total + residual).to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def places(N, GATED: tl.constexpr, ROWS: tl.constexpr):
    """(this program's outputs, how many there are); GATED: half as many as rows."""
    rows: tl.constexpr = ROWS // 2 if GATED else ROWS
    width = N // 2 if GATED else N
    return tl.program_id(0) * rows + tl.arange(0, rows), width
