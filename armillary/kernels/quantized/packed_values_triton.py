"""What kernels over packed weights share in Triton: codes and scales as numbers, scales of groups, sums of rows."""

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
        return e4m3_number(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def e4m3_number(code):
    """Bytes of E4M3 as fp32, on GPUs without fp8 units too: their bits moved to where fp16 has them, which divides by
    2^8. NaN becomes 480."""
    bits = ((code.to(tl.int32) & 0x80) << 8) | ((code.to(tl.int32) & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


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
def table_pair(w, table_ptr, J: tl.constexpr):
    """The numbers that the codes at the nibbles J and J + 4 stand for."""
    return tl.load(table_ptr + ((w >> (4 * J)) & 15)), tl.load(table_ptr + ((w >> (4 * J + 16)) & 15))


# --- K-quants: `k_quants` says how they lie; columns past the last read the last one's scale


@triton.jit
def pair_of(word, J: tl.constexpr, KIND: tl.constexpr):
    """Which pair of columns of a row is at the nibbles J and J + 4 of words."""
    span: tl.constexpr = 4 if KIND == "q4_k" or KIND == "q5_k" or KIND == "q6_k" else 16
    return word // span * (4 * span) + span * J + word % span


@triton.jit
def words_of_row(WORDS, KIND: tl.constexpr):
    """int32 words from a row of 4-bit codes to the next."""
    if KIND == "q5_k":
        return WORDS + WORDS // 4
    elif KIND == "q6_k":
        return WORDS + WORDS // 2
    else:
        return WORDS


@triton.jit
def high_bits(w_row, word, WORDS, KIND: tl.constexpr):
    """What is above the low four bits of words, for rows that start at w_row: those of the nibbles 0 to 3 from bit 0
    on, of the others from bit 16 on; 0 where nothing is."""
    at = tl.minimum(word, WORDS - 1)
    if KIND == "q5_k":
        h = tl.load((w_row + WORDS).to(tl.pointer_type(tl.uint8)) + at).to(tl.int32)
        return (h & 15) | ((h & 240) << 12)
    elif KIND == "q6_k":
        h = tl.load((w_row + WORDS).to(tl.pointer_type(tl.int16)) + at).to(tl.int32)
        return (h & 255) | ((h & 65280) << 8)
    else:
        return 0


@triton.jit
def raised(h, J: tl.constexpr, KIND: tl.constexpr):
    """The bits above those of the nibbles J and J + 4, at bits 4 and 20."""
    if KIND == "q5_k":
        return moved(h, 4 - J) & 0x00100010
    else:
        return moved(h, 4 - 2 * J) & 0x00300030


@triton.jit
def k_row(scale_ptr, row, K, KIND: tl.constexpr):
    """Where the scales of rows start."""
    return scale_ptr + row * (K // 16 + K // 256 * (2 if KIND == "q6_k" else 4))


@triton.jit
def k_scale(bytes_row, column, K, KIND: tl.constexpr):
    at = tl.minimum(column, K - 1)
    halves = (bytes_row + K // 16).to(tl.pointer_type(tl.float16))
    if KIND == "q6_k":
        level = tl.load(bytes_row + at // 16).to(tl.int8, bitcast=True).to(tl.float32)
        return level * tl.load(halves + at // 256).to(tl.float32)
    else:
        return tl.load(bytes_row + at // 32).to(tl.float32) * tl.load(halves + at // 256 * 2).to(tl.float32)


@triton.jit
def k_minimum(bytes_row, column, K):
    """Of Q4_K and Q5_K."""
    at = tl.minimum(column, K - 1)
    half = tl.load((bytes_row + K // 16).to(tl.pointer_type(tl.float16)) + at // 256 * 2 + 1).to(tl.float32)
    return tl.load(bytes_row + K // 32 + at // 32).to(tl.float32) * half


@triton.jit
def k_pair(w, h, bytes_row, column, K, J: tl.constexpr, KIND: tl.constexpr):
    """The numbers at the nibbles J and J + 4 of words whose columns, two each, begin there."""
    both = moved(w, -4 * J) & 0x000F000F
    if KIND != "q4_k":
        both = both | raised(h, J, KIND)
    first, second, scale = (both & 63).to(tl.float32), (both >> 16).to(tl.float32), k_scale(bytes_row, column, K, KIND)
    if KIND == "q6_k":
        return (first - 32.0) * scale, (second - 32.0) * scale
    else:
        minimum = k_minimum(bytes_row, column, K)
        return first * scale - minimum, second * scale - minimum


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
