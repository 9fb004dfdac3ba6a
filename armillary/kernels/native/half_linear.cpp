// y = x @ weight^T + bias with a weight in bf16 and inputs in fp32, for a few tokens: half the bytes of fp32 are read.

#include <omp.h>

#include "vector_math.h"

template <int T>
static void row_of(const uint8_t* w, const float* x, int64_t columns, float* sums) {
    f32x16 even[T], odd[T];
    for (int t = 0; t < T; t++) even[t] = odd[t] = all(0.0f);
    int64_t c = 0;
    for (; c + 32 <= columns; c += 32) {
        __builtin_prefetch(w + 2 * c + 3072, 0, 2);
        const f32x16 a = bfloat_to_float(w + 2 * c), b = bfloat_to_float(w + 2 * c + 32);
        for (int t = 0; t < T; t++) {
            even[t] += a * load_f32(x + t * columns + c);
            odd[t] += b * load_f32(x + t * columns + c + 16);
        }
    }
    if (c < columns)
        for (int t = 0; t < T; t++) even[t] += bfloat_to_float(w + 2 * c) * load_f32(x + t * columns + c);
    for (int t = 0; t < T; t++) sums[t] = sum_of(even[t] + odd[t]);
}

extern "C" void armillary_half_linear(const uint8_t* weight, const float* x, int64_t tokens, int64_t rows,
                                      int64_t columns, const float* bias, float* y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > (1 << 15))
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t* w = weight + 2 * r * columns;
        int64_t t = 0;
        float sums[4];
        auto put = [&](int count) {
            for (int i = 0; i < count; i++) y[(t + i) * rows + r] = sums[i] + (bias ? bias[r] : 0.0f);
            t += count;
        };
        while (t + 4 <= tokens) row_of<4>(w, x + t * columns, columns, sums), put(4);
        while (t < tokens) row_of<1>(w, x + t * columns, columns, sums), put(1);
    }
}
