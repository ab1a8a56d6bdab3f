// The arithmetic of slices.h, compiled as kernel.cpp is: once for each instruction set, without the standard library.
#include "slices.h"
#include "vectors.h"

namespace kvc {
namespace {

// The RMSNorm of `size` elements; `out` may be `x`.
template <class T>
void norm_one(const T* x, const float* weight, float epsilon, int64_t size, T* out) {
    Floats a, b, c, d, squares = {}, more = {};
    for (int64_t i = 0; i < size; i += 2 * W) {
        widen(x + i, a, b);
        squares += a * a;
        more += b * b;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of(squares + more) / (float)size + epsilon);
    for (int64_t i = 0; i < size; i += 2 * W) {
        widen(x + i, a, b);
        arrange(T{}, weight + i, c, d);
        narrow(out + i, a * scale * c, b * scale * d);
    }
}

template <class T>
void norm_rows(const kvc_norm& work, int64_t first, int64_t last) {
    int64_t size = work.size;
    for (int64_t row = first; row < last; row++) {
        const T* x = (const T*)work.x + row * size;
        if (work.added) {
            const T* added = (const T*)work.added + row * size;
            T* sum = (T*)work.sum + row * size;
            for (int64_t i = 0; i < size; i += 2 * W) {
                Floats a, b, c, d;
                widen(x + i, a, b);
                widen(added + i, c, d);
                narrow(sum + i, a + c, b + d);
            }
            x = sum;
        }
        norm_one(x, work.weight, work.epsilon, size, (T*)work.out + row * size);
    }
}

template <class T>
void rotate_rows(const kvc_rotation& work, int64_t first, int64_t last) {
    int64_t dim = work.dim, half = dim / 2;
    for (int64_t row = first; row < last; row++) {
        const float *cos = work.cos + row * half, *sin = work.sin + row * half;
        for (int64_t head = 0; head < work.heads; head++) {
            T* x = (T*)work.x + row * work.row + head * dim;
            if (work.weight) norm_one(x, work.weight + head * dim, work.epsilon, dim, x);
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

// To bfloat16.
void narrow_all(const float* from, void* to, int64_t count) {
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) {
        Floats a = load<Floats>(from + i), b = load<Floats>(from + i + W);
        narrow((Bf16*)to + i, evens(a, b), odds(a, b));
    }
    for (; i < count; i++) ((Bf16*)to)[i].bits = (uint16_t)(rounded(all(from[i]))[0] >> 16);
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
    W, supported, norm, rotate, gate, narrow_all};

}  // namespace kvc
