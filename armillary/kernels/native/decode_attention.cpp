// From the fused projection to attention: norms of queries and keys, rotary positions and the write to the paged cache;
// and, for the newest token of each of some sequences, softmax(q · K) · V over the pages of the sequence.

#include <omp.h>

#include <limits>
#include <vector>

#include "vector_math.h"

constexpr int MOST_GROUP = 32, MOST_DIM = 256;

struct Decode {
    int64_t sequences, kv_heads, group, dim, rotated;  // `rotated`: pairs of dims
    int64_t page_size, pages;                          // pages: columns of the table
    int64_t page_bytes, value_bytes, head_bytes;       // strides of the cache; values lie `value_bytes` after keys
    int32_t half, interleaved, plus_one, window;       // half: the cache is in bf16
    float eps, scale;
    const float* qkv;  // [sequences, kv_heads, group + 2, dim]
    float* out;        // [sequences, kv_heads · group, dim]
    uint8_t* cache;
    const int64_t* slots;    // where key and value go; negative: nowhere
    const int32_t* tables;   // [sequences, pages]
    const int32_t* lengths;  // keys, the new one included
    const float *cosines, *sines;        // [sequences, rotated] or null
    const float *q_weight, *k_weight;    // [dim]; null: no norm
    const float* sinks;                  // [kv_heads · group] or null
};

template <bool HALF>
INLINE f32x16 load_cached(const uint8_t* p, int64_t i) {
    return HALF ? bfloat_to_float(p + 2 * i) : load_f32((const float*)p + i);
}

template <bool HALF>
static void store_cached(uint8_t* p, const float* x, int64_t dim) {
    if (!HALF) return (void)memcpy(p, x, 4 * dim);
    for (int64_t i = 0; i < dim; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        const uint16_t half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
        memcpy(p + 2 * i, &half, 2);
    }
}

static void norm_head(const float* x, const float* weight, const Decode& d, float* y) {
    float squares = 0;
    for (int64_t i = 0; i < d.dim; i++) squares += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(squares / d.dim + d.eps), more = d.plus_one ? 1.0f : 0.0f;
    for (int64_t i = 0; i < d.dim; i++) y[i] = x[i] * inverse * (weight[i] + more);
}

static void rotate(float* x, const Decode& d, int64_t sequence) {
    const float *c = d.cosines + sequence * d.rotated, *s = d.sines + sequence * d.rotated;
    const int64_t step = d.interleaved ? 2 : 1, apart = d.interleaved ? 1 : d.rotated;
    for (int64_t i = 0; i < d.rotated; i++) {
        float &a = x[step * i], &b = x[step * i + apart];
        const float first = a, second = b;
        a = first * c[i] - second * s[i];
        b = second * c[i] + first * s[i];
    }
}

// Keys of a page, from `begin` to `end`: f(number of the key, its place in memory).
template <class F>
static void each_key(const Decode& d, const int32_t* table, int64_t first, int64_t length, const uint8_t* base,
                     int64_t key_bytes, F f) {
    for (int64_t s = first; s < length;) {
        const int64_t place = s % d.page_size, count = std::min(d.page_size - place, length - s);
        const uint8_t* at = base + table[s / d.page_size] * d.page_bytes + place * key_bytes;
        for (int64_t i = 0; i < count; i++, s++, at += key_bytes) f(s - first, at);
    }
}

// Queries and the key (the last) of a head of a token, as attention takes them; key and value go into the cache.
template <bool HALF>
static void project(const Decode& d, int64_t token, int64_t head, float (*q)[MOST_DIM]) {
    const int64_t dim = d.dim, group = d.group;
    const float* row = d.qkv + (token * d.kv_heads + head) * (group + 2) * dim;
    for (int64_t g = 0; g <= group; g++) {
        const float* weight = g < group ? d.q_weight : d.k_weight;
        if (weight) norm_head(row + g * dim, weight, d, q[g]);
        else memcpy(q[g], row + g * dim, 4 * dim);
        if (d.cosines) rotate(q[g], d, token);
    }
    if (const int64_t slot = d.slots[token]; slot >= 0) {
        uint8_t* at = d.cache + head * d.head_bytes + slot / d.page_size * d.page_bytes +
                      slot % d.page_size * dim * (HALF ? 2 : 4);
        store_cached<HALF>(at, q[group], dim);
        store_cached<HALF>(at + d.value_bytes, row + (group + 1) * dim, dim);
    }
}

template <bool HALF>
static void attend(const Decode& d, int64_t sequence, int64_t head, std::vector<float>& scores) {
    const int64_t dim = d.dim, group = d.group, length = d.lengths[sequence], size = HALF ? 2 : 4;
    float* out = d.out + (sequence * d.kv_heads + head) * group * dim;
    const uint8_t* own = d.cache + head * d.head_bytes;
    alignas(64) float q[MOST_GROUP + 1][MOST_DIM];
    project<HALF>(d, sequence, head, q);
    if (!length) return (void)std::fill(out, out + group * dim, 0.0f);
    const int32_t* table = d.tables + sequence * d.pages;
    const int64_t first = d.window ? std::max<int64_t>(0, length - d.window) : 0, keys = length - first;
    if ((int64_t)scores.size() < group * (keys + 16)) scores.resize(group * (keys + 16));
    const int64_t wide = (keys + 15) / 16 * 16;
    each_key(d, table, first, length, own, dim * size, [&](int64_t s, const uint8_t* key) {
        for (int64_t g = 0; g < group; g++) {
            f32x16 sums = all(0.0f);
            for (int64_t i = 0; i < dim; i += 16) sums += load_f32(q[g] + i) * load_cached<HALF>(key, i);
            scores[g * wide + s] = sum_of(sums) * d.scale;
        }
    });
    float total[MOST_GROUP];
    for (int64_t g = 0; g < group; g++) {
        float* mine = &scores[g * wide];
        const float sink = d.sinks ? d.sinks[head * group + g] : -std::numeric_limits<float>::infinity();
        const float most = std::max(sink, *std::max_element(mine, mine + keys));
        std::fill(mine + keys, mine + wide, -std::numeric_limits<float>::infinity());
        f32x16 sums = all(0.0f);
        for (int64_t s = 0; s < wide; s += 16) {
            f32x16 p = exp_of(load_f32(mine + s) - most);
            if (s + 16 > keys)
                for (int64_t i = keys - s; i < 16; i++) p[i] = 0;
            store_f32(mine + s, p);
            sums += p;
        }
        total[g] = sum_of(sums) + (d.sinks ? std::exp(sink - most) : 0.0f);
    }
    alignas(64) float mixed[MOST_GROUP][MOST_DIM] = {};
    each_key(d, table, first, length, own + d.value_bytes, dim * size, [&](int64_t s, const uint8_t* value) {
        for (int64_t g = 0; g < group; g++) {
            const float p = scores[g * wide + s];
            for (int64_t i = 0; i < dim; i += 16)
                store_f32(mixed[g] + i, load_f32(mixed[g] + i) + p * load_cached<HALF>(value, i));
        }
    });
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++) out[g * dim + i] = mixed[g][i] / total[g];
}

// Queries of many tokens, ready for attention, go to `out`; keys and values into the cache.
extern "C" void armillary_qkv_cache(const Decode* given, int threads) {
    const Decode& d = *given;
    const int64_t heads = d.sequences * d.kv_heads;
#pragma omp parallel for schedule(static) num_threads(threads) if (heads * d.group * d.dim > (1 << 15))
    for (int64_t task = 0; task < heads; task++) {
        alignas(64) float q[MOST_GROUP + 1][MOST_DIM];
        if (d.half) project<true>(d, task / d.kv_heads, task % d.kv_heads, q);
        else project<false>(d, task / d.kv_heads, task % d.kv_heads, q);
        for (int64_t g = 0; g < d.group; g++) memcpy(d.out + (task * d.group + g) * d.dim, q[g], 4 * d.dim);
    }
}

extern "C" void armillary_decode(const Decode* given, int threads) {
    const Decode& d = *given;
    int64_t keys = 0;
    for (int64_t t = 0; t < d.sequences; t++) keys += d.lengths[t];
#pragma omp parallel for schedule(static) num_threads(threads) if (keys * d.kv_heads * d.dim > (1 << 15))
    for (int64_t task = 0; task < d.sequences * d.kv_heads; task++) {
        static thread_local std::vector<float> scores;
        if (d.half) attend<true>(d, task / d.kv_heads, task % d.kv_heads, scores);
        else attend<false>(d, task / d.kv_heads, task % d.kv_heads, scores);
    }
}
