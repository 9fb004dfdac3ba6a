// Tiles of 16 tokens and 16 rows on the matrix units of x86 (AMX).
//
// A panel's vectors, four columns of 16 rows each, are tile B as they lie; tile A are 16 tokens of inputs, RUN columns of
// each. Integer sums go to memory once per RUN columns with one scale, or once per row where scales are per row.

#pragma once

#include "inputs.h"

#if defined(__linux__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)

#include <sys/syscall.h>
#include <unistd.h>

constexpr bool MATRIX_UNITS = true;

// Whether the kernel lets this process use them; it must be asked once.
static bool has_matrix_units() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return granted;
}

// Tiles 0 to 3 are sums, 4, 6 and 7 inputs (A), 5 codes (B).
struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
};

static void begin_tiles(int run) {
    alignas(64) TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    for (int i : {4, 6, 7}) shapes.bytes[i] = run;
    shapes.rows[5] = run / 4;
    asm volatile("ldtilecfg %0" ::"m"(shapes));  // gcc 12's intrinsic reads 8 of the 64 bytes
}

static void end_tiles() { asm volatile("tilerelease"); }

// The intrinsics take names of tiles, not constants of templates.
template <int TILE>
INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}

template <int TILE>
INLINE void store_tile(int32_t* to) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"((int64_t)64) : "memory");
}

template <int TILE>
INLINE void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }

INLINE void load_codes(const uint8_t* codes) { load_tile<5>(codes, 64); }

template <int C, int A, bool SIGNED>
INLINE void multiply(const int8_t* inputs, int stride) {
    load_tile<A>(inputs, stride);
    if (SIGNED)
        asm volatile("tdpbssd %%tmm5, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A));
    else
        asm volatile("tdpbsud %%tmm5, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A));
}

// Sums of 16 tokens over RUN columns, in memory.
template <int C, int A, bool SIGNED>
INLINE void sums_of(const int8_t* inputs, int stride, int32_t* sums) {
    zero_tile<C>();
    multiply<C, A, SIGNED>(inputs, stride);
    store_tile<C>(sums);
}

// Sums of NUM tiles of tokens over whole rows, in memory; RUN columns are multiplied at a time.
template <int RUN, int NUM>
static void sums_of_rows(const uint8_t* codes, const int8_t* inputs, int64_t columns, int32_t* sums) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t c = 0; c < columns; c += RUN, codes += RUN * 16, inputs += RUN * 16) {
        load_codes(codes);
        multiply<0, 4, false>(inputs, RUN);
        if (NUM > 1) multiply<1, 6, false>(inputs + 16 * columns, RUN);
        if (NUM > 2) multiply<2, 7, false>(inputs + 32 * columns, RUN);
        if (NUM > 3) multiply<3, 4, false>(inputs + 48 * columns, RUN);
    }
    store_tile<0>(sums);
    if (NUM > 1) store_tile<1>(sums + 256);
    if (NUM > 2) store_tile<2>(sums + 512);
    if (NUM > 3) store_tile<3>(sums + 768);
}

#else

constexpr bool MATRIX_UNITS = false;

static bool has_matrix_units() { return false; }
static void begin_tiles(int) {}
static void end_tiles() {}
INLINE void load_codes(const uint8_t*) {}

template <int C, int A, bool SIGNED>
INLINE void sums_of(const int8_t*, int, int32_t*) {}

template <int RUN, int NUM>
static void sums_of_rows(const uint8_t*, const int8_t*, int64_t, int32_t*) {}

#endif
