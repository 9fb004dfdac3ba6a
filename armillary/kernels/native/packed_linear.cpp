// Linear layers over packed weights: y = x @ weight^T + bias with codes multiplied as integers.
//
// 16 rows are a panel. For every 32 columns a panel has eight vectors of 64 bytes: four columns of 16 rows each. Codes
// of 4 bits share a byte with those 16 columns further on; bits 5 and 6 follow in vectors of their own. Inputs are
// rounded to int8. `armillary/kernels/native/packed_weight.py` writes this layout and has the reference.

#include <omp.h>

#include "matrix_units.h"

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

    uint8_t subtracted() const { return minima == NONE ? zero : 0; }  // from each code
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

constexpr int MOST_WIDE = 4;  // wide tiles that share a reading of the codes
constexpr int64_t INPUT_BYTES = 1 << 20;  // of the tokens that all panels multiply before the next: half of an L2

// Codes of RUN columns less their zero: tile B.
template <int BITS, bool TABLE, int RUN>
INLINE void unpack(const Weight& w, const uint8_t* panel_codes, u8x16 values, int64_t step, u8x64* out) {
    constexpr int QUADS = RUN / 4, PARTS = CHUNK / RUN;
    const uint8_t* code = panel_codes + step / PARTS * w.chunk_bytes;
#pragma GCC unroll 8
    for (int j = 0; j < QUADS; j++) {
        const u8x64 v = Codes<BITS>::at(code, step % PARTS * QUADS + j);
        out[j] = (TABLE ? look_up(values, v) : v) - w.subtracted();
    }
}

// Sums of `num` wide tiles of tokens and 16 rows; RUN columns share a weight scale. SIGNED: codes less their zero fit a
// signed byte. Tiles are loaded and stored through memory, which is there only when the stores have retired: so codes
// are unpacked a step ahead, and scales applied a step behind.
template <int BITS, bool TABLE, int RUN, bool SIGNED>
static void wide_tiles(const Weight& w, const Rounded& x, int64_t panel, int64_t token, int num, f32x16* y) {
    constexpr int PARTS = CHUNK / RUN;
    u8x16 values;
    memcpy(&values, w.values, 16);
    u8x64 unpacked[2][RUN / 4];
    i32x16 sums[2][MOST_WIDE][WIDE];
    for (int t = 0; t < WIDE * num; t++) y[t] = all(0.0f);
    const int64_t steps = w.columns / RUN;
    const uint8_t* panel_codes = w.codes + panel * (w.columns / CHUNK) * w.chunk_bytes;
    Cursor cursor(w, panel);
    unpack<BITS, TABLE, RUN>(w, panel_codes, values, 0, unpacked[0]);
    for (int64_t step = 0; step <= steps; step++) {
        if (step + 1 < steps) unpack<BITS, TABLE, RUN>(w, panel_codes, values, step + 1, unpacked[(step + 1) & 1]);
        if (step < steps) {
            load_codes((const uint8_t*)unpacked[step & 1]);
            const int8_t* in = &x.codes[token * x.columns + step / PARTS * CHUNK * WIDE + step % PARTS * RUN];
            auto& here = sums[step & 1];
            sums_of<0, 4, SIGNED>(in, CHUNK, (int32_t*)here[0]);
            if (num > 1) sums_of<1, 6, SIGNED>(in + WIDE * x.columns, CHUNK, (int32_t*)here[1]);
            if (num > 2) sums_of<2, 7, SIGNED>(in + 2 * WIDE * x.columns, CHUNK, (int32_t*)here[2]);
            if (num > 3) sums_of<3, 4, SIGNED>(in + 3 * WIDE * x.columns, CHUNK, (int32_t*)here[3]);
        }
        if (!step) continue;
        const int64_t last = step - 1;
        const f32x16 scale = cursor.scales();
        for (int i = 0; i < num; i++) {
            const float* scale_x = &x.scale[(token + WIDE * i) * x.scales() + last / PARTS * WIDE];
#pragma GCC unroll 16
            for (int t = 0; t < WIDE; t++) y[WIDE * i + t] += to_float(sums[last & 1][i][t]) * (scale * scale_x[t]);
        }
        if (w.minima != NONE) {
            const f32x16 minimum = cursor.minima(scale);
            for (int i = 0; i < num; i++) {
                const float* sum_x = &x.sum[(token + WIDE * i) * x.sums() + last * WIDE];
#pragma GCC unroll 16
                for (int t = 0; t < WIDE; t++) y[WIDE * i + t] -= minimum * sum_x[t];
            }
        }
        cursor.advance(RUN);
    }
}

// The same with one scale per row and per token; RUN columns are multiplied at a time.
template <int RUN>
static void wide_tiles_of_rows(const Weight& w, const Rounded& x, int64_t panel, int64_t token, int num, f32x16* y) {
    alignas(64) i32x16 sums[MOST_WIDE * WIDE];
    const uint8_t* codes = w.codes + panel * 16 * w.columns;
    const int8_t* inputs = &x.codes[token * x.columns];
    switch (num) {
        case 1: sums_of_rows<RUN, 1>(codes, inputs, w.columns, (int32_t*)sums); break;
        case 2: sums_of_rows<RUN, 2>(codes, inputs, w.columns, (int32_t*)sums); break;
        case 3: sums_of_rows<RUN, 3>(codes, inputs, w.columns, (int32_t*)sums); break;
        default: sums_of_rows<RUN, 4>(codes, inputs, w.columns, (int32_t*)sums);
    }
    const f32x16 scale = Cursor(w, panel).scales();
    for (int t = 0; t < WIDE * num; t++)
        y[t] = to_float(sums[t] + x.begin[token + t]) * (scale * x.scale[token + t]);
}

typedef void (*WideTiles)(const Weight&, const Rounded&, int64_t, int64_t, int, f32x16*);

struct WideKernel {
    WideTiles tiles;
    int run;
};

static WideKernel wide_kernel(const Weight& w, int wide) {
    if (w.inputs == TOKENS) return wide == 64 ? WideKernel{wide_tiles_of_rows<64>, 64} : WideKernel{wide_tiles_of_rows<32>, 32};
    if (w.table && w.group == 16) return {wide_tiles<4, true, 16, true>, 16};
    if (w.table) return {wide_tiles<4, true, 32, true>, 32};
    switch (w.bits) {
        case 4: return {wide_tiles<4, false, 32, true>, 32};
        case 5: return {wide_tiles<5, false, 32, true>, 32};
        case 6: return {wide_tiles<6, false, 16, true>, 16};
        default: return w.subtracted() ? WideKernel{wide_tiles<8, false, 32, true>, 32}
                                      : WideKernel{wide_tiles<8, false, 32, false>, 32};
    }
}

static void write(const Weight& w, int64_t panel, f32x16 sums, const float* bias, float* y) {
    if (!w.order) {
        if (bias) sums += load_f32(bias + panel * 16);
        memcpy(y + panel * 16, &sums, 64);
        return;
    }
    for (int r = 0; r < 16; r++) {
        const int64_t at = w.order[panel * 16 + r];
        y[at] = sums[r] + (bias ? bias[at] : 0.0f);
    }
}

static void wide_panel_of(const Weight& w, const Rounded& x, int64_t panel, WideTiles wide, int64_t token, int64_t end,
                          const float* bias, float* y, int64_t stride) {
    f32x16 sums[MOST_WIDE * WIDE];
    while (token < end) {
        const int num = std::min<int64_t>(MOST_WIDE, (end - token) / WIDE);
        wide(w, x, panel, token, num, sums);
        for (int t = 0; t < WIDE * num; t++) write(w, panel, sums[t], bias, y + (token + t) * stride);
        token += WIDE * num;
    }
}

static void panel_of(const Weight& w, const Rounded& x, int64_t panel, const Tile* tiles, const float* bias, float* y,
                     int64_t stride) {
    f32x16 sums[TILES[0]];
    int64_t token = x.wide_tokens;
    for (int s = 0; s < 3; s++)
        for (; token + TILES[s] <= x.tokens; token += TILES[s]) {
            tiles[s](w, x, panel, token, sums);
            for (int t = 0; t < TILES[s]; t++) write(w, panel, sums[t], bias, y + (token + t) * stride);
        }
}

extern "C" const char* armillary_units() { return has_matrix_units() ? UNITS " and AMX" : UNITS; }

static void panels_of(const Weight& w, const Rounded& x, int64_t begin, int64_t end, const float* bias, float* y,
                      int64_t stride) {
    const Tile tiles[] = {tile_of<12>(w), tile_of<4>(w), tile_of<1>(w)};
    if (x.wide_tokens) {
        const WideKernel wide = wide_kernel(w, x.wide);
        const int64_t block = std::max<int64_t>(INPUT_BYTES / w.columns / (MOST_WIDE * WIDE), 1) * MOST_WIDE * WIDE;
        begin_tiles(wide.run);
        for (int64_t token = 0; token < x.wide_tokens; token += block)
            for (int64_t p = begin; p < end; p++)
                wide_panel_of(w, x, p, wide.tiles, token, std::min(token + block, x.wide_tokens), bias, y, stride);
        end_tiles();
    }
    if (x.wide_tokens < x.tokens)
        for (int64_t p = begin; p < end; p++) panel_of(w, x, p, tiles, bias, y, stride);
}

// `most` [tokens]: with inputs in one scale per token, the largest absolute value of the row; null: that of x.
extern "C" void armillary_linear(const Weight* weight, const float* x, int64_t tokens, const float* most,
                                 const float* bias, float* y, int64_t stride, int threads) {
    const Weight& w = *weight;
    static thread_local Rounded rounded;
    Rounded* inputs = &rounded;
    const int run = w.bits == 6 || w.group == 16 ? 16 : 32;
    inputs->shape(tokens, w.columns, (Inputs)w.inputs, run, MATRIX_UNITS && tokens >= WIDE && has_matrix_units());
    const int times = offset(w.table ? 4 : w.bits) - w.subtracted();
    const int64_t panels = w.rows / 16;
    if (threads <= 1 || tokens * w.rows * w.columns < (1 << 17)) {
        for (int64_t t = 0; t < tokens; t++) inputs->round(t, x + t * w.columns, times, most ? most + t : nullptr);
        panels_of(w, *inputs, 0, panels, bias, y, stride);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) inputs->round(t, x + t * w.columns, times, most ? most + t : nullptr);
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        panels_of(w, *inputs, panels * part / parts, panels * (part + 1) / parts, bias, y, stride);
    }
}
