// Calls the kernels with what a file holds, and writes what they give: so that tests run them on another processor.
//
// A record of the file: the kernel's number, sizes, and arrays, each a count of bytes and the bytes.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

struct Weight {  // as in packed_linear.cpp
    int64_t rows, columns;
    int32_t bits, table, scales, minima, zero, group, inputs, chunk_bytes;
    const uint8_t *codes, *scale, *minimum, *super, *super_min;
    const int32_t* order;
    uint8_t values[16];
};

extern "C" {
const char* armillary_units();
void armillary_linear(const Weight*, const float*, int64_t, const float*, const float*, float*, int64_t, int);
void armillary_few_rows(const float*, const float*, int64_t, int64_t, int64_t, const float*, float*, int);
void armillary_half_linear(const uint8_t*, const float*, int64_t, int64_t, int64_t, const float*, float*, int);
}

static FILE* in;

static int64_t number() {
    int64_t n = -1;
    return fread(&n, 8, 1, in) == 1 ? n : -1;
}

static std::vector<uint8_t> bytes() {
    std::vector<uint8_t> all(number());
    if (!all.empty() && fread(all.data(), all.size(), 1, in) != 1) all.clear();
    return all;
}

int main(int, char** arguments) {
    in = fopen(arguments[1], "rb");
    FILE* out = fopen(arguments[2], "wb");
    fputs(armillary_units(), stdout);
    for (int64_t kernel; (kernel = number()) >= 0;) {
        const int64_t tokens = number(), rows = number(), columns = number();
        const std::vector<uint8_t> x = bytes();
        std::vector<float> y(tokens * rows);
        if (kernel == 0) {
            Weight w{rows, columns};
            for (int32_t* field : {&w.bits, &w.table, &w.scales, &w.minima, &w.zero, &w.group, &w.inputs, &w.chunk_bytes})
                *field = number();
            const std::vector<uint8_t> arrays[] = {bytes(), bytes(), bytes(), bytes(), bytes(), bytes()};
            w.codes = arrays[0].data(), w.scale = arrays[1].data(), w.minimum = arrays[2].data();
            w.super = arrays[3].data(), w.super_min = arrays[4].data();
            memcpy(w.values, arrays[5].data(), 16);
            armillary_linear(&w, (const float*)x.data(), tokens, nullptr, nullptr, y.data(), rows, 1);
        } else {
            const std::vector<uint8_t> weight = bytes();
            if (kernel == 1) armillary_few_rows((const float*)weight.data(), (const float*)x.data(), tokens, rows, columns, nullptr, y.data(), 1);
            if (kernel == 2) armillary_half_linear(weight.data(), (const float*)x.data(), tokens, rows, columns, nullptr, y.data(), 1);
        }
        fwrite(y.data(), 4, y.size(), out);
    }
    return fclose(out);
}
