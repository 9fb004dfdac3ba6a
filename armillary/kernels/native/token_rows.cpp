// What lies between two GEMMs of a layer, row by row: the RMS norm with the residual added before it, and gated SiLU.

#include <omp.h>

#include "vector_math.h"

static const int64_t FEW = 1 << 15;  // numbers that one thread has done before others have started

// y = x̂ · w with x̂ = (x + residual) / rms; `sum` is x + residual, where there is a residual.
extern "C" void armillary_add_norm(const float* x, const float* residual, const float* weight, float* sum, float* y,
                                   int64_t rows, int64_t columns, float eps, int plus_one, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * columns > FEW)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * columns, *other = residual ? residual + r * columns : nullptr;
        float *out = y + r * columns, *total = residual ? sum + r * columns : nullptr;
        f32x16 squares = all(0.0f);
        float tail = 0;
        int64_t c = 0;
        for (; c + 16 <= columns; c += 16) {
            f32x16 v = load_f32(in + c);
            if (other) store_f32(total + c, v += load_f32(other + c));
            squares += v * v;
        }
        for (; c < columns; c++) {
            float v = in[c];
            if (other) total[c] = v += other[c];
            tail += v * v;
        }
        const float inverse = 1.0f / std::sqrt((sum_of(squares) + tail) / columns + eps);
        const float* from = other ? total : in;
        const float more = plus_one ? 1.0f : 0.0f;
        for (c = 0; c + 16 <= columns; c += 16) {
            f32x16 v = load_f32(from + c) * inverse;
            if (weight) v *= load_f32(weight + c) + more;
            store_f32(out + c, v);
        }
        for (; c < columns; c++) out[c] = from[c] * inverse * (weight ? weight[c] + more : 1.0f);
    }
}

// y[i] = silu(x[2i]) · x[2i + 1]: gate and up alternate.
extern "C" void armillary_gated_silu(const float* x, float* y, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (size > FEW)
    for (int64_t block = 0; block < (size + 1023) / 1024; block++) {
        const int64_t end = std::min(size, (block + 1) * 1024);
        int64_t i = block * 1024;
        for (; i + 16 <= end; i += 16) {
            const f32x16 a = load_f32(x + 2 * i), b = load_f32(x + 2 * i + 16);
            const f32x16 gate = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const f32x16 up = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            store_f32(y + i, gate * up / (1.0f + exp_of(-gate)));
        }
        for (; i < end; i++) y[i] = x[2 * i] * x[2 * i + 1] / (1.0f + std::exp(-x[2 * i]));
    }
}
