// The arithmetic of slices.h, compiled as kernel.cpp is: once for each instruction set, without the standard library.
#include "slices.h"
#include "vectors.h"

namespace kvc {
namespace {

// To the nearest, ties to even; not a number stays one.
inline Bits rounded(Floats x) {
    Bits bits = (Bits)x;
    Bits nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    return x == x ? nearest : bits | 0x400000u;
}

// What `widen` makes two registers of, back in its place.
inline void narrow(Bf16* to, Floats a, Floats b) {
    Bits pairs = (rounded(a) >> 16) | (rounded(b) & 0xffff0000u);
    __builtin_memcpy(to, &pairs, sizeof pairs);
}

inline void narrow(float* to, Floats a, Floats b) {
    store(to, a);
    store(to + W, b);
}

template <class T>
void norm_rows(const kvc_norm& work, int64_t first, int64_t last) {
    int64_t size = work.size;
    for (int64_t row = first; row < last; row++) {
        const T* x = (const T*)work.x + row * size;
        Floats a, b, squares = {}, more = {};
        if (work.added) {
            const T* added = (const T*)work.added + row * size;
            T* sum = (T*)work.sum + row * size;
            for (int64_t i = 0; i < size; i += 2 * W) {
                Floats c, d;
                widen(x + i, a, b);
                widen(added + i, c, d);
                narrow(sum + i, a + c, b + d);
            }
            x = sum;
        }
        for (int64_t i = 0; i < size; i += 2 * W) {
            widen(x + i, a, b);
            squares += a * a;
            more += b * b;
        }
        float scale = 1.0f / __builtin_sqrtf(sum_of(squares + more) / (float)size + work.epsilon);
        T* out = (T*)work.out + row * size;
        for (int64_t i = 0; i < size; i += 2 * W) {
            Floats c, d;
            widen(x + i, a, b);
            arrange(T{}, work.weight + i, c, d);
            narrow(out + i, a * scale * c, b * scale * d);
        }
    }
}

template <class T>
void rotate_rows(const kvc_rotation& work, int64_t first, int64_t last) {
    int64_t dim = work.dim, half = dim / 2;
    for (int64_t row = first; row < last; row++) {
        const float *cos = work.cos + row * half, *sin = work.sin + row * half;
        for (int64_t head = 0; head < work.heads; head++) {
            const T* x = (const T*)work.x + row * work.row + head * dim;
            T* out = (T*)work.out + (row * work.heads + head) * dim;
            for (int64_t i = 0; i < half; i += 2 * W) {
                Floats a, b, c, d, cos_a, cos_b, sin_a, sin_b;
                widen(x + i, a, b);
                widen(x + half + i, c, d);
                arrange(T{}, cos + i, cos_a, cos_b);
                arrange(T{}, sin + i, sin_a, sin_b);
                narrow(out + i, a * cos_a - c * sin_a, b * cos_b - d * sin_b);
                narrow(out + half + i, c * cos_a + a * sin_a, d * cos_b + b * sin_b);
            }
        }
    }
}

inline Floats silu(Floats x) {
    Floats low = exponential(x < Floats{} ? x : -x);  // exp(-|x|)
    return x * (x < Floats{} ? low : all(1.0f)) / (low + 1.0f);
}

template <class T>
void gate_rows(const kvc_gate& work, int64_t first, int64_t last) {
    int64_t size = work.size;
    for (int64_t row = first; row < last; row++) {
        const T *gate = (const T*)work.x + 2 * row * size, *up = gate + size;
        T* out = (T*)work.out + row * size;
        for (int64_t i = 0; i < size; i += 2 * W) {
            Floats a, b, c, d;
            widen(gate + i, a, b);
            widen(up + i, c, d);
            narrow(out + i, silu(a) * c, silu(b) * d);
        }
    }
}

// ROWS of the matrix times COUNT rows of x: each element of both is loaded once for as many products as registers
// hold sums of.
template <int ROWS, int COUNT>
inline void multiply_tile(const kvc_product& work, int64_t row, int64_t at) {
    int64_t size = work.size;
    const Bf16* weight = (const Bf16*)work.weight + row * size;
    const float* x = work.arranged + at * size;
    Floats sums[ROWS][COUNT] = {};
    for (int64_t d = 0; d < size; d += 2 * W) {
        Floats a[ROWS], b[ROWS];
        for (int i = 0; i < ROWS; i++) {
            // The next tile's: left to itself the processor begins anew with each row.
            if (at == 0) prefetch<2 * W>(weight + (ROWS + i) * size + d);
            widen(weight + i * size + d, a[i], b[i]);
        }
        for (int c = 0; c < COUNT; c++) {
            Floats xa = load<Floats>(x + c * size + d), xb = load<Floats>(x + c * size + d + W);
            for (int i = 0; i < ROWS; i++) sums[i][c] += a[i] * xa;
            for (int i = 0; i < ROWS; i++) sums[i][c] += b[i] * xb;
        }
    }
    for (int i = 0; i < ROWS; i++) {
        uint32_t bits = work.bias ? (uint32_t)((const Bf16*)work.bias)[row + i].bits << 16 : 0;
        float bias;
        __builtin_memcpy(&bias, &bits, sizeof bias);
        for (int c = 0; c < COUNT; c++)
            ((Bf16*)work.out)[(at + c) * work.rows + row + i].bits = rounded(all(sum_of(sums[i][c]) + bias))[0] >> 16;
    }
}

template <int ROWS>
inline void multiply_rows(const kvc_product& work, int64_t row) {
    constexpr int COUNT = W == 16 ? 4 : 2;
    int64_t at = 0;
    for (; at + COUNT <= work.count; at += COUNT) multiply_tile<ROWS, COUNT>(work, row, at);
    for (; at < work.count; at++) multiply_tile<ROWS, 1>(work, row, at);
}

void multiply(const kvc_product& work, int64_t first, int64_t last) {
    constexpr int ROWS = W == 16 ? 4 : 2;
    int64_t row = first;
    for (; row + ROWS <= last; row += ROWS) multiply_rows<ROWS>(work, row);
    for (; row < last; row++) multiply_rows<1>(work, row);
}

void arrange_rows(const kvc_product& work) {
    for (int64_t i = 0; i < work.count * work.size; i += 2 * W) {
        Floats a, b;
        arrange(Bf16{}, work.x + i, a, b);
        store(work.arranged + i, a);
        store(work.arranged + i + W, b);
    }
}

void norm(const kvc_norm& work, int64_t first, int64_t last) {
    work.is_bf16 ? norm_rows<Bf16>(work, first, last) : norm_rows<float>(work, first, last);
}

void rotate(const kvc_rotation& work, int64_t first, int64_t last) {
    work.is_bf16 ? rotate_rows<Bf16>(work, first, last) : rotate_rows<float>(work, first, last);
}

void gate(const kvc_gate& work, int64_t first, int64_t last) {
    work.is_bf16 ? gate_rows<Bf16>(work, first, last) : gate_rows<float>(work, first, last);
}

#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)

}  // namespace

extern const SliceVariant JOINED(slices_, KVC_VARIANT) = {
    W, supported, norm, rotate, gate, arrange_rows, multiply};

}  // namespace kvc
