// Inputs rounded to signed bytes: a scale per 32 columns, per 256, or per token.
//
// Tokens are in tiles of 12, 4 or 1, and what a tile of T tokens needs for the same columns is adjacent: codes are
// [columns / 4, T, 4], scales [columns / 32, T] and sums [columns / run, T] of each tile. For matrix units tokens are in
// tiles of 16 as far as they go, whose codes are [columns / wide, 16, wide].

#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

constexpr int CHUNK = 32;  // columns that are read together
constexpr int TILES[] = {12, 4, 1};
constexpr int WIDE = 16;  // tokens of a tile of the matrix units

enum Inputs { CHUNKS, HALF_CHUNKS, SUPERS, TOKENS };  // columns with one scale: 32, 32 with fp16 scales, 256, all

// To the nearest of fp16's numbers, ties to even.
INLINE float half_rounded(float f) {
    if (f < 0x1p-14f) return (f + 0.5f) - 0.5f;  // multiples of 2^-24, the last place of 0.5
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits = (bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu;
    memcpy(&f, &bits, 4);
    return f;
}

struct Rounded {
    int64_t tokens, columns;
    Inputs inputs;
    int run;                     // columns per sum: 16 or 32; 0: a sum per token
    int wide;                    // columns of a token of a wide tile that are adjacent: 32 or 64
    int64_t wide_tokens;         // tokens in wide tiles
    std::vector<int8_t> codes;
    std::vector<float> scale;
    std::vector<int32_t> begin;  // sums of codes times (offset - zero): what accumulators begin with
    std::vector<float> sum;      // scale times the sum of codes, for formats with minima

    int64_t sums() const { return run ? columns / run : 1; }
    int64_t scales() const { return run ? columns / CHUNK : 1; }

    void shape(int64_t tokens_, int64_t columns_, Inputs inputs_, int run_, bool wide_tiles) {
        tokens = tokens_, columns = columns_, inputs = inputs_, run = inputs == TOKENS ? 0 : run_;
        wide = !run && columns % 64 == 0 ? 64 : CHUNK, wide_tokens = wide_tiles ? tokens / WIDE * WIDE : 0;
        grow(codes, tokens * columns);
        grow(scale, tokens * scales());
        grow(begin, tokens * sums());
        grow(sum, tokens * sums());
    }

    template <class T>
    static void grow(std::vector<T>& v, int64_t size) {
        if ((int64_t)v.size() < size) v.resize(size);
    }

    // The first token and the size of a token's tile.
    int64_t tile_of(int64_t token, int& size) const {
        if (token < wide_tokens) return size = WIDE, token / WIDE * WIDE;
        int64_t first = wide_tokens;
        for (int each : TILES) {
            const int64_t end = first + (tokens - first) / each * each;
            if (token < end) return size = each, first + (token - first) / each * each;
            first = end;
        }
        return size = 1, token;
    }

    // `most`: the largest absolute value of a longer row that x is a part of; null: x is the row.
    void round(int64_t token, const float* x, int times, const float* most) {
        int size;
        const int64_t first = tile_of(token, size), place = token - first;
        const int span = inputs == SUPERS ? 256 : CHUNK;
        float top = run ? 0 : most ? *most : largest(x, columns), d = top / 127.0f;
        int32_t total = 0;
        for (int64_t c = 0; c < columns; c += CHUNK) {
            if (run && c % span == 0) {
                top = largest(x + c, span), d = top / 127.0f;
                if (inputs == HALF_CHUNKS) d = half_rounded(d);
            }
            int8_t rounded[CHUNK];
            int32_t halves[2];
            round_codes(x + c, top, rounded, halves);
            int8_t* out = &codes[first * columns];
            if (size == WIDE)
                memcpy(out + (c / wide * WIDE + place) * wide + c % wide, rounded, CHUNK);
            else
                for (int quad = 0; quad < CHUNK / 4; quad++)
                    memcpy(out + ((c / 4 + quad) * size + place) * 4, rounded + 4 * quad, 4);
            total += halves[0] + halves[1];
            if (!run) continue;
            scale[first * scales() + c / CHUNK * size + place] = d;
            if (run == CHUNK) halves[0] += halves[1];
            for (int i = 0; i < CHUNK / run; i++) {
                const int64_t where = first * sums() + (c / run + i) * size + place;
                begin[where] = times * halves[i], sum[where] = d * halves[i];
            }
        }
        if (!run) scale[token] = d, begin[token] = times * total;
    }

    static float largest(const float* x, int64_t count) {
        f32x16 most = all(0.0f);
        for (int64_t i = 0; i < count; i += 16) {
            const f32x16 v = load_f32(x + i), a = v < 0 ? -v : v;
            most = a > most ? a : most;
        }
        return largest_of(most);
    }

    // `halves`: the sums of 16 codes.
    static void round_codes(const float* x, float top, int8_t* out, int32_t* halves) {
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        for (int i = 0; i < CHUNK; i += 16) {
            // adding 1.5 * 2^23 rounds to the nearest integer, which is then in the last bits
            const i32x16 r = (i32x16)(load_f32(x + i) * inverse + 12582912.0f) - 0x4b400000;
            const i8x16 b = __builtin_convertvector(r, i8x16);
            memcpy(out + i, &b, 16);
            halves[i / 16] = sum_of(r);
        }
    }
};
