// y = x @ weight^T + bias in fp32 for a few tokens, such as draft tokens that are verified: the weight is read once, four
// rows at a time, for all of them. Every sum is taken in the same order, however many tokens there are.

#include <omp.h>

#include "vector_math.h"

static const int R = 4;  // rows of the weight at a time

template <int T, int ROWS>
static void tile(const float* w, const float* x, int64_t columns, float* y, int64_t rows, const float* bias) {
    f32x16 sums[ROWS][T];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = all(0.0f);
    for (int64_t c = 0; c < columns; c += 16) {
        f32x16 in[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) in[t] = load_f32(x + t * columns + c);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __builtin_prefetch(w + r * columns + c + 512, 0, 2);
            const f32x16 a = load_f32(w + r * columns + c);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[r][t] += a * in[t];
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < ROWS; r++) y[t * rows + r] = sum_of(sums[r][t]) + (bias ? bias[r] : 0.0f);
}

template <int ROWS>
static void some_rows(const float* w, const float* x, int64_t tokens, int64_t columns, float* y, int64_t rows,
                      const float* bias) {
    while (tokens > 0) {
        const int64_t count = tokens > 5 && tokens < 10 ? (tokens + 1) / 2 : tokens < 5 ? tokens : 5;
        if (count == 5) tile<5, ROWS>(w, x, columns, y, rows, bias);
        if (count == 4) tile<4, ROWS>(w, x, columns, y, rows, bias);
        if (count == 3) tile<3, ROWS>(w, x, columns, y, rows, bias);
        if (count == 2) tile<2, ROWS>(w, x, columns, y, rows, bias);
        if (count == 1) tile<1, ROWS>(w, x, columns, y, rows, bias);
        x += count * columns, y += count * rows, tokens -= count;
    }
}

// x [tokens, columns] and y [tokens, rows]; columns in sixteens.
extern "C" void armillary_few_rows(const float* weight, const float* x, int64_t tokens, int64_t rows, int64_t columns,
                                   const float* bias, float* y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns > (1 << 15))
    for (int64_t block = 0; block < (rows + R - 1) / R; block++) {
        const int64_t r = block * R;
        const float *w = weight + r * columns, *b = bias ? bias + r : nullptr;
        if (r + R <= rows)
            some_rows<R>(w, x, tokens, columns, y + r, rows, b);
        else
            for (int64_t i = 0; r + i < rows; i++)
                some_rows<1>(w + i * columns, x, tokens, columns, y + r + i, rows, b ? b + i : nullptr);
    }
}
