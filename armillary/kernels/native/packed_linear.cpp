// Linear layers over packed weights: y = x @ weight^T + bias with codes multiplied as integers.
//
// 16 rows are a panel. For every 32 columns a panel has eight vectors of 64 bytes: four columns of 16 rows each. Codes
// of 4 bits share a byte with those 16 columns further on; bits 5 and 6 follow in vectors of their own. Inputs are
// rounded to int8. `armillary/kernels/native/packed_weight.py` writes this layout and has the reference.

#include <omp.h>

#include "inputs.h"

constexpr int AHEAD = 3072;  // bytes: of 1 to 12 KB, one core of a Xeon at 2.5 GHz reads fastest, 10.0 instead of 8.9 GB/s
enum Scales { F32, F16, BF16, SUPER, E8M0, E4M3 };
enum Minima { NONE, ZERO, SUPER_MIN };

struct Weight {
    int64_t rows, columns;
    int32_t bits, table, scales, minima, zero;
    int32_t group;      // columns of a scale; the row's for one per row
    int32_t inputs;     // `Inputs`; of one scale per token, weights have one per row
    int32_t chunk_bytes;
    const uint8_t* codes;    // [panels, columns / 32, chunk_bytes]
    const uint8_t* scale;    // [panels, columns / group, 16]
    const uint8_t* minimum;  // the same, u8: zero points, or minima
    const uint8_t* super;      // [panels, columns / 256, 16] fp16: factor of SUPER scales; [panels, 16] fp32 of E4M3
    const uint8_t* super_min;  // fp16: factor of SUPER_MIN
    const int32_t* order;      // row n of the weight is output order[n]; null: n
    uint8_t values[16];        // of codes in a table
};

template <int BITS>
struct Codes {
    static INLINE_MEMBER u8x64 at(const uint8_t* p, int j) {
        if (BITS == 8) return load64(p + 64 * j);
        u8x64 v = load64(p + 64 * (j & 3));
        v = (j < 4 ? v : shift_right(v, 4)) & 15;
        if (BITS == 5) {
            const u8x64 h = load64(p + 256);
            v |= (j < 4 ? (u8x64)((u16x32)h << (4 - j)) : shift_right(h, j - 4)) & 16;
        }
        if (BITS == 6) {
            const u8x64 h = load64(p + 256 + 64 * (j >> 2));
            const int by = 4 - 2 * (j & 3);
            v |= (by >= 0 ? (u8x64)((u16x32)h << by) : shift_right(h, -by)) & 48;
        }
        return v;
    }
};

// Where the scales of a panel are read, 16 at a time, as columns go by.
struct Cursor {
    const Weight& w;
    const uint8_t *scale, *minimum, *super, *super_min;
    int64_t left, column = 0;
    int step;

    Cursor(const Weight& weight, int64_t panel) : w(weight), left(weight.group) {
        const int64_t groups = w.columns / w.group, supers = w.columns / 256;
        step = 16 * (w.scales == F32 ? 4 : w.scales == F16 || w.scales == BF16 ? 2 : 1);
        scale = w.scale + panel * groups * step;
        minimum = w.minimum + panel * groups * 16;
        super = w.scales == E4M3 ? w.super + panel * 64 : w.super + panel * supers * 32;
        super_min = w.super_min + panel * supers * 32;
    }

    INLINE_MEMBER f32x16 scales() const {
        switch (w.scales) {
            case F32: return load_f32((const float*)scale);
            case F16: return half_to_float(scale);
            case BF16: return bfloat_to_float(scale);
            case SUPER: return signed_bytes_to_float(scale) * half_to_float(super + 32 * (column >> 8));
            case E8M0: {  // 2^(e - 128): codes count twice their values; two factors, so that neither overflows
                const u32x16 e = bytes_wide(scale), half = e >> 1;
                return bits_of((half + 63) << 23) * bits_of((e - half + 63) << 23);
            }
            default: {  // E4M3 has the exponent of a half that is 2^8 times larger; times a number per row
                const u16x16 half = __builtin_convertvector(bytes_wide(scale) << 7, u16x16);
                return half_to_float((const uint8_t*)&half) * 256.0f * load_f32((const float*)super);
            }
        }
    }

    INLINE_MEMBER f32x16 minima(f32x16 scales) const {
        const f32x16 code = to_float((i32x16)bytes_wide(minimum));
        return code * (w.minima == ZERO ? scales : half_to_float(super_min + 32 * (column >> 8)));
    }

    INLINE_MEMBER void advance(int columns) {
        column += columns;
        if ((left -= columns) > 0) return;
        left = w.group;
        scale += step;
        minimum += 16;
    }
};

// What a single token reads soon: the CPU's own prefetching ends at pages of 4 KB.
INLINE void prefetch(const uint8_t* code, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(code + AHEAD + i, 0, 2);
}

// Sums of T tokens and 16 rows; RUN columns share a weight scale.
template <int BITS, bool TABLE, int T, int RUN>
static void tile(const Weight& w, const Rounded& x, int64_t panel, int64_t token, f32x16* y) {
    u8x16 values;
    memcpy(&values, w.values, 16);
    const int8_t* codes_x = &x.codes[token * x.columns];
    const float *scale_x = &x.scale[token * x.scales()], *sum_x = &x.sum[token * x.sums()];
    const int32_t* begin_x = &x.begin[token * x.sums()];
    f32x16 total[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) total[t] = all(0.0f);
    const int64_t chunks = w.columns / CHUNK;
    const uint8_t* code = w.codes + panel * chunks * w.chunk_bytes;
    Cursor cursor(w, panel);
    for (int64_t c = 0; c < chunks; c++, code += w.chunk_bytes, scale_x += T) {
        if (T == 1) prefetch(code, w.chunk_bytes);
        constexpr int QUADS = RUN / 4;
#pragma GCC unroll 2
        for (int part = 0; part < CHUNK / RUN; part++) {
            i32x16 acc[T];
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) acc[t] = all(begin_x[t]);
#pragma GCC unroll 8
            for (int j = 0; j < QUADS; j++) {
                u8x64 v = Codes<BITS>::at(code, part * QUADS + j);
                if (TABLE) v = look_up(values, v);
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) acc[t] = dot<BITS>(acc[t], v, codes_x + 4 * (j * T + t));
            }
            const f32x16 scale = cursor.scales();
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) total[t] += to_float(acc[t]) * (scale * scale_x[t]);
            if (w.minima != NONE) {
                const f32x16 minimum = cursor.minima(scale);
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) total[t] -= minimum * sum_x[t];
            }
            cursor.advance(RUN);
            codes_x += RUN * T, begin_x += T, sum_x += T;
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) y[t] = total[t];
}

// The same with one scale per row and per token: integers throughout.
template <int T>
static void tile_of_rows(const Weight& w, const Rounded& x, int64_t panel, int64_t token, f32x16* y) {
    const int8_t* codes_x = &x.codes[token * x.columns];
    i32x16 acc[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) acc[t] = all(x.begin[token + t]);
    const int64_t chunks = w.columns / CHUNK;
    const uint8_t* code = w.codes + panel * chunks * w.chunk_bytes;
    for (int64_t c = 0; c < chunks; c++, code += w.chunk_bytes, codes_x += CHUNK * T) {
        if (T == 1) prefetch(code, 512);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const u8x64 v = load64(code + 64 * j);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) acc[t] = dot<8>(acc[t], v, codes_x + 4 * (j * T + t));
        }
    }
    const f32x16 scale = Cursor(w, panel).scales();
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) y[t] = to_float(acc[t]) * (scale * x.scale[token + t]);
}

typedef void (*Tile)(const Weight&, const Rounded&, int64_t, int64_t, f32x16*);

template <int T>
static Tile tile_of(const Weight& w) {
    if (w.inputs == TOKENS) return tile_of_rows<T>;
    if (w.table) return w.group == 16 ? tile<4, true, T, 16> : tile<4, true, T, 32>;
    switch (w.bits) {
        case 4: return tile<4, false, T, 32>;
        case 5: return tile<5, false, T, 32>;
        case 6: return tile<6, false, T, 16>;
        default: return tile<8, false, T, 32>;
    }
}

static void write(const Weight& w, int64_t panel, const f32x16& sums, const float* bias, float* y) {
    for (int r = 0; r < 16; r++) {
        const int64_t row = panel * 16 + r, at = w.order ? w.order[row] : row;
        y[at] = sums[r] + (bias ? bias[at] : 0.0f);
    }
}

static void panel_of(const Weight& w, const Rounded& x, int64_t panel, const Tile* tiles, const float* bias, float* y,
                     int64_t stride) {
    f32x16 sums[TILES[0]];
    int64_t token = 0;
    for (int s = 0; s < 3; s++)
        for (; token + TILES[s] <= x.tokens; token += TILES[s]) {
            tiles[s](w, x, panel, token, sums);
            for (int t = 0; t < TILES[s]; t++) write(w, panel, sums[t], bias, y + (token + t) * stride);
        }
}

extern "C" const char* armillary_units() { return UNITS; }

// `most` [tokens]: with inputs in one scale per token, the largest absolute value of the row; null: that of x.
extern "C" void armillary_linear(const Weight* weight, const float* x, int64_t tokens, const float* most,
                                 const float* bias, float* y, int64_t stride, int threads) {
    const Weight& w = *weight;
    static thread_local Rounded rounded;
    Rounded* inputs = &rounded;
    inputs->shape(tokens, w.columns, (Inputs)w.inputs, w.bits == 6 || w.group == 16 ? 16 : 32);
    const Tile tiles[] = {tile_of<12>(w), tile_of<4>(w), tile_of<1>(w)};
    const int times = offset(w.table ? 4 : w.bits) - (w.minima == NONE ? w.zero : 0);
    const int64_t panels = w.rows / 16;
    if (threads <= 1 || tokens * w.rows * w.columns < (1 << 17)) {
        for (int64_t t = 0; t < tokens; t++) inputs->round(t, x + t * w.columns, times, most ? most + t : nullptr);
        for (int64_t p = 0; p < panels; p++) panel_of(w, *inputs, p, tiles, bias, y, stride);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) inputs->round(t, x + t * w.columns, times, most ? most + t : nullptr);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) panel_of(w, *inputs, p, tiles, bias, y, stride);
    }
}
