// Loops whose time is one latency or one width: a chain of dependent loads, atomics, barriers, y += a·x by vector width.
// Plain C++ with GCC's vector types, so the same source runs on x86 and ARM.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Two vectors of `bytes` in one iteration of a loop that the compiler may not widen.
template <int bytes>
void saxpy(float a, const float* x, float* y, int64_t count) {
    typedef float vector __attribute__((vector_size(bytes), aligned(4), may_alias));
    const int64_t width = bytes / sizeof(float);
    for (int64_t i = 0; i + width <= count; i += width) {
        *reinterpret_cast<vector*>(y + i) += a * *reinterpret_cast<const vector*>(x + i);
    }
}

struct alignas(256) Line {
    std::atomic<int64_t> value{0};
};

}  // namespace

extern "C" {

// Seconds for `steps` loads, each of whose addresses is the result of the one before. `*last` keeps the chain alive.
double armillary_chase(void** start, int64_t steps, void** last) {
    void** at = start;
    const auto begin = Clock::now();
    for (int64_t step = 0; step < steps; step += 8) {
        at = static_cast<void**>(*at); at = static_cast<void**>(*at);
        at = static_cast<void**>(*at); at = static_cast<void**>(*at);
        at = static_cast<void**>(*at); at = static_cast<void**>(*at);
        at = static_cast<void**>(*at); at = static_cast<void**>(*at);
    }
    const double seconds = seconds_since(begin);
    *last = at;
    return seconds;
}

// Seconds per atomic add of `threads` threads to one counter, `count` each.
double armillary_atomic(int threads, int64_t count) {
    Line line;
    std::atomic<int> ready{0};
    std::vector<std::thread> workers;
    std::vector<double> seconds(threads);
    for (int t = 0; t < threads; ++t) {
        workers.emplace_back([&, t] {
            ready.fetch_add(1);
            while (ready.load() < threads) {}
            const auto begin = Clock::now();
            for (int64_t i = 0; i < count; ++i) line.value.fetch_add(1);
            seconds[t] = seconds_since(begin);
        });
    }
    double longest = 0;
    for (int t = 0; t < threads; ++t) {
        workers[t].join();
        longest = seconds[t] > longest ? seconds[t] : longest;
    }
    return longest / count;
}

// Seconds for a number to pass from one thread to another and back, halved: one way between two cores.
double armillary_hand_over(int64_t count) {
    Line ball;
    std::thread other([&] {
        for (int64_t i = 0; i < count; ++i) {
            while (ball.value.load(std::memory_order_acquire) != 2 * i + 1) {}
            ball.value.store(2 * i + 2, std::memory_order_release);
        }
    });
    ball.value.store(1, std::memory_order_release);
    while (ball.value.load(std::memory_order_acquire) != 2) {}
    const auto begin = Clock::now();
    for (int64_t i = 1; i < count; ++i) {
        ball.value.store(2 * i + 1, std::memory_order_release);
        while (ball.value.load(std::memory_order_acquire) != 2 * i + 2) {}
    }
    const double seconds = seconds_since(begin);
    other.join();
    return seconds / (2.0 * (count > 1 ? count - 1 : 1));
}

// Seconds per barrier of `threads` threads: the last to arrive opens the next round.
double armillary_barrier(int threads, int64_t count) {
    Line arrived, round;
    std::vector<std::thread> workers;
    std::vector<double> seconds(threads);
    for (int t = 0; t < threads; ++t) {
        workers.emplace_back([&, t] {
            Clock::time_point begin;
            for (int64_t i = 0; i < count + 1; ++i) {
                if (arrived.value.fetch_add(1) == threads - 1) {
                    arrived.value.store(0);
                    round.value.store(i + 1);
                } else {
                    while (round.value.load() != i + 1) {}
                }
                if (i == 0) begin = Clock::now();
            }
            seconds[t] = seconds_since(begin);
        });
    }
    double longest = 0;
    for (int t = 0; t < threads; ++t) {
        workers[t].join();
        longest = seconds[t] > longest ? seconds[t] : longest;
    }
    return longest / count;
}

// Seconds per y += a·x by loads of `bytes`, of `repeats` in a row; -1 for a width there is no loop for.
double armillary_saxpy(int bytes, float a, const float* x, float* y, int64_t count, int64_t repeats) {
    void (*run)(float, const float*, float*, int64_t) = nullptr;
    switch (bytes) {
        case 4: run = saxpy<4>; break;
        case 8: run = saxpy<8>; break;
        case 16: run = saxpy<16>; break;
        case 32: run = saxpy<32>; break;
        case 64: run = saxpy<64>; break;
        default: return -1;
    }
    const auto begin = Clock::now();
    for (int64_t i = 0; i < repeats; ++i) run(a, x, y, count);
    return seconds_since(begin) / repeats;
}
}
