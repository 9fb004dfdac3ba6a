// Sixteen lanes at a time: the integer dot product of each instruction set, and conversions.
//
// dot() multiplies 64 unsigned codes (four for each of 16 rows) by four signed inputs and adds the sums to 16 lanes.
// Where the units multiply signed by signed, codes of 8 bits count as code - 128; `offset` says so.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

INLINE u8x64 load64(const uint8_t* p) { u8x64 v; memcpy(&v, p, 64); return v; }
INLINE f32x16 load_f32(const float* p) { f32x16 v; memcpy(&v, p, 64); return v; }
INLINE f32x16 all(float x) { return f32x16{} + x; }
INLINE i32x16 all(int32_t x) { return i32x16{} + x; }
INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
INLINE f32x16 bits_of(u32x16 v) { return (f32x16)v; }

// Of all lanes, halves on each other.
INLINE int32_t sum_of(i32x16 v) {
    typedef int32_t i32x8 __attribute__((vector_size(32)));
    typedef int32_t i32x4 __attribute__((vector_size(16)));
    i32x8 a[2];
    i32x4 b[2];
    memcpy(a, &v, 64);
    a[0] += a[1];
    memcpy(b, a, 32);
    b[0] += b[1];
    return b[0][0] + b[0][1] + (b[0][2] + b[0][3]);
}

INLINE float largest_of(f32x16 v) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x8 a[2];
    f32x4 b[2];
    memcpy(a, &v, 64);
    a[0] = a[0] > a[1] ? a[0] : a[1];
    memcpy(b, a, 32);
    b[0] = b[0] > b[1] ? b[0] : b[1];
    const float low = b[0][0] > b[0][1] ? b[0][0] : b[0][1], high = b[0][2] > b[0][3] ? b[0][2] : b[0][3];
    return low > high ? low : high;
}

INLINE u8x64 shift_right(u8x64 v, int bits) { return (u8x64)((u16x32)v >> bits); }  // the caller masks what crosses bytes

INLINE f32x16 half_to_float(const uint8_t* p) {
#if defined(__AVX512F__)
    __m256i v;
    memcpy(&v, p, 32);
    return (f32x16)_mm512_cvtph_ps(v);
#else
    f32x16 y;
#if defined(__F16C__)
    for (int i = 0; i < 2; i++) {
        __m256 f = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
        memcpy((char*)&y + 32 * i, &f, 32);
    }
#elif defined(__ARM_NEON)
    for (int i = 0; i < 4; i++) {
        float32x4_t f = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)(p + 8 * i))));
        memcpy((char*)&y + 16 * i, &f, 16);
    }
#else
    uint16_t h[16];
    memcpy(h, p, 32);
    for (int i = 0; i < 16; i++) {  // exponent and mantissa as those of a float, which is then 2^112 too small
        uint32_t bits = (uint32_t)(h[i] & 0x7fff) << 13;
        float f;
        memcpy(&f, &bits, 4);
        f = (h[i] & 0x7c00) == 0x7c00 ? (h[i] & 0x3ff ? NAN : INFINITY) : f * 0x1p112f;
        y[i] = h[i] & 0x8000 ? -f : f;
    }
#endif
    return y;
#endif
}

INLINE f32x16 bfloat_to_float(const uint8_t* p) {
    u16x16 v;
    memcpy(&v, p, 32);
    return bits_of(__builtin_convertvector(v, u32x16) << 16);
}

INLINE u32x16 bytes_wide(const uint8_t* p) {
    u8x16 v;
    memcpy(&v, p, 16);
    return __builtin_convertvector(v, u32x16);
}

INLINE f32x16 signed_bytes_to_float(const uint8_t* p) {
    i8x16 v;
    memcpy(&v, p, 16);
    return to_float(__builtin_convertvector(v, i32x16));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

#define UNITS "AVX-512 VNNI"
constexpr int offset(int) { return 0; }

template <int BITS>
INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t* x4) {
    int32_t quad;
    memcpy(&quad, x4, 4);
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(quad));
}

INLINE u8x64 look_up(u8x16 table, u8x64 codes) {
    return (u8x64)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)codes);
}

#elif defined(__AVX2__)

#if defined(__AVXVNNI__)
#define UNITS "AVX-VNNI"
constexpr int offset(int) { return 0; }
#else
#define UNITS "AVX2"
constexpr int offset(int bits) { return bits == 8 ? 128 : 0; }
#endif

template <int BITS>
INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t* x4) {
    int32_t quad;
    memcpy(&quad, x4, 4);
    const __m256i x = _mm256_set1_epi32(quad);
    __m256i sums[2], w[2];
    memcpy(sums, &acc, 64);
    memcpy(w, &codes, 64);
    for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
        sums[i] = _mm256_dpbusd_avx_epi32(sums[i], w[i], x);
#else
        __m256i pairs;
        if (BITS == 8) {  // |code - 128| <= 128 and |x| <= 127: a pair fits 16 bits
            const __m256i s = _mm256_xor_si256(w[i], _mm256_set1_epi8(-128));
            pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x, s));
        } else {
            pairs = _mm256_maddubs_epi16(w[i], x);
        }
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
    memcpy(&acc, sums, 64);
    return acc;
}

INLINE u8x64 look_up(u8x16 table, u8x64 codes) {
    __m256i w[2];
    memcpy(w, &codes, 64);
    const __m256i both = _mm256_broadcastsi128_si256((__m128i)table);
    for (int i = 0; i < 2; i++) w[i] = _mm256_shuffle_epi8(both, w[i]);
    memcpy(&codes, w, 64);
    return codes;
}

#elif defined(__ARM_FEATURE_DOTPROD)

#define UNITS "NEON dot products"
constexpr int offset(int bits) { return bits == 8 ? 128 : 0; }

template <int BITS>
INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t* x4) {
    int32_t quad;
    memcpy(&quad, x4, 4);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    if (BITS == 8) codes ^= 128;
    int32x4_t sums[4];
    int8x16_t w[4];
    memcpy(sums, &acc, 64);
    memcpy(w, &codes, 64);
    for (int i = 0; i < 4; i++) sums[i] = vdotq_s32(sums[i], w[i], x);
    memcpy(&acc, sums, 64);
    return acc;
}

INLINE u8x64 look_up(u8x16 table, u8x64 codes) {
    uint8x16_t w[4];
    memcpy(w, &codes, 64);
    for (int i = 0; i < 4; i++) w[i] = vqtbl1q_u8((uint8x16_t)table, w[i]);
    memcpy(&codes, w, 64);
    return codes;
}

#else

#define UNITS "plain C++"
constexpr int offset(int) { return 0; }

template <int BITS>
INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t* x4) {
    for (int row = 0; row < 16; row++)
        for (int i = 0; i < 4; i++) acc[row] += (int32_t)codes[4 * row + i] * x4[i];
    return acc;
}

INLINE u8x64 look_up(u8x16 table, u8x64 codes) {
    for (int i = 0; i < 64; i++) codes[i] = table[codes[i] & 15];
    return codes;
}

#endif
