// The sum of a tensor over processes, in memory that all of them map: everybody writes its own part, waits until all
// parts of this number are there, and adds them up in the order of the ranks, so that all get the same bits.
//
//     flags   one cache line per rank: the number of its last part
//     parts   [2][rank]: of even and odd numbers. Who has finished number n knows that all have written n, so nobody
//             reads n - 1 any more and its parts may be overwritten

#include <sched.h>
#include <time.h>

#include <atomic>
#include <algorithm>

#include "lanes.h"

static const int64_t LINE = 64, SPINS = 4096;  // spins before the core is offered to others

static double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static bool wait_for(std::atomic<int64_t>& flag, int64_t number, double patience_s) {
    for (int64_t spin = 0; spin < SPINS; spin++) {
        if (flag.load(std::memory_order_acquire) >= number) return true;
        pause_core();
    }
    const double end = seconds() + patience_s;
    while (flag.load(std::memory_order_acquire) < number) {
        sched_yield();
        if (seconds() > end) return false;
    }
    return true;
}

static u16x16 rounded(f32x16 x) {
    const u32x16 bits = (u32x16)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32x16 is_nan = (u32x16)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((is_nan & ((bits >> 16) | 0x40)) | (~is_nan & nearest), u16x16);
}

static void add_up(const float* parts, int64_t stride, int ranks, float* y, int64_t size) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        f32x16 sum = load_f32(parts + i);
        for (int r = 1; r < ranks; r++) sum += load_f32(parts + r * stride + i);
        memcpy(y + i, &sum, 64);
    }
    for (; i < size; i++) {
        float sum = parts[i];
        for (int r = 1; r < ranks; r++) sum += parts[r * stride + i];
        y[i] = sum;
    }
}

static void add_up(const uint16_t* parts, int64_t stride, int ranks, uint16_t* y, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) {
        uint16_t part[16] = {};
        const int64_t count = std::min<int64_t>(16, size - i);
        f32x16 sum = {};
        for (int r = 0; r < ranks; r++) {
            const uint16_t* in = parts + r * stride + i;
            if (count < 16) in = (uint16_t*)memcpy(part, in, 2 * count);
            const f32x16 more = bfloat_to_float((const uint8_t*)in);
            sum = r ? sum + more : more;
        }
        const u16x16 out = rounded(sum);
        memcpy(y + i, &out, 2 * count);
    }
}

// y = Σ x over ranks, for `size` numbers of `width` bytes (4: float, 2: bfloat16) that fit `part_bytes`. `number` counts
// calls from 1. Returns -1, or a rank that has not come within `patience_s`: then call once more, `resumed`.
extern "C" int armillary_shared_sum(char* memory, int64_t part_bytes, int rank, int ranks, int64_t number, const void* x,
                                    void* y, int64_t size, int width, int resumed, double patience_s) {
    auto flag = [&](int r) -> std::atomic<int64_t>& { return *(std::atomic<int64_t>*)(memory + r * LINE); };
    char* parts = memory + ranks * LINE + (number & 1) * ranks * part_bytes;
    if (!resumed) {
        memcpy(parts + rank * part_bytes, x, size * width);
        flag(rank).store(number, std::memory_order_release);
    }
    for (int r = 0; r < ranks; r++)
        if (!wait_for(flag(r), number, patience_s)) return r;
    if (width == 4)
        add_up((const float*)parts, part_bytes / 4, ranks, (float*)y, size);
    else
        add_up((const uint16_t*)parts, part_bytes / 2, ranks, (uint16_t*)y, size);
    return -1;
}
