// Sums over lanes and the exponential function, for the kernels in fp32.

#pragma once

#include <algorithm>

#include "lanes.h"

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

INLINE void store_f32(float* p, f32x16 v) { memcpy(p, &v, 64); }

INLINE float sum_of(f32x16 v) {
    const f32x8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const f32x4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[1]) + (b[2] + b[3]);
}

// e^x to 2 units in the last place: 2^n · p(f) with n = round(x / ln 2), |f| <= ln 2 / 2; beyond ±87 as at ±87.
INLINE f32x16 exp_of(f32x16 x) {
    x = x < 87.0f ? x : all(87.0f);
    x = x > -87.0f ? x : all(-87.0f);
    const f32x16 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: the integer is in the last bits
    const f32x16 n = shifted - 12582912.0f;
    const f32x16 f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    f32x16 p = 1.9875691500e-4f * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return p * bits_of((u32x16)(((i32x16)shifted - 0x4b400000 + 127) << 23));
}
