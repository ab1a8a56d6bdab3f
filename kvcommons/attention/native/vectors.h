// Registers of KVC_WIDTH floats, as the compiler's vector types: one text for every instruction set.
#pragma once

#include "attend.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvc {
namespace {

constexpr int W = KVC_WIDTH;

// Whether this processor has the instruction set that is compiled for.
inline bool supported() {
#if defined(KVC_NEEDS)
    return KVC_NEEDS;
#else
    return true;
#endif
}

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));

struct Bf16 {
    uint16_t bits;
};
// Bfloat16 that is multiplied as it is, by queries that are bfloat16, too: see `add_pairs`.
struct Pairs {
    uint16_t bits;
};

// What keys are multiplied with.
float query_for(float);
float query_for(Bf16);
Pairs query_for(Pairs);
template <class K>
using Query = decltype(query_for(K{}));

// How far ahead memory is asked for. Left to itself the processor reads ahead within a page, and then waits: without
// asking, 40 to 73% of the bandwidth were reached.
constexpr int64_t AHEAD_BYTES = 16384;
constexpr int LINE = 64;
// And into which cache, as compilers count them: 2 is the second one. Into the first one fewer requests can be under way,
// and what is computed with is driven out of it.
constexpr int CACHE = 2;

template <class V>
inline V load(const void* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }

// Four bytes that are multiplied at once: a float, or two neighbouring bfloat16.
typedef uint32_t Word;

inline Floats every(Word word) { return (Floats)(word - Bits{}); }

inline Floats all(float x) { return x - Floats{}; }

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

// Whether an element of `a` is greater than that of `b`.
inline bool any_above(Floats a, Floats b) {
#if KVC_WIDTH == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif KVC_WIDTH == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#elif defined(__SSE2__)
    return _mm_movemask_ps(_mm_cmpgt_ps((__m128)a, (__m128)b));
#else
    Ints above = a > b;
    return above[0] | above[1] | above[2] | above[3];
#endif
}

// 2 W elements as two registers. Bfloat16 comes as even and odd elements, which costs a shift and a mask; queries
// are brought into the same order, and results back out of it.
inline void widen(const Bf16* from, Floats& a, Floats& b) {
    Bits pairs = load<Bits>(from);
    a = (Floats)(pairs << 16);
    b = (Floats)(pairs & 0xffff0000u);
}

inline void widen(const float* from, Floats& a, Floats& b) {
    a = load<Floats>(from);
    b = load<Floats>(from + W);
}

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

constexpr float LOG2_E = 1.44269504f;

// 2^x to 1 unit in the last place of a float or two, for x that is not great; 0 where that is not a normal number.
inline Floats power_of_two(Floats x) {
    Floats turns = x + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    Floats r = x - (turns - 12582912.0f);
    Floats p = all(1.5353362e-4f);
    p = p * r + 1.3398875e-3f;
    p = p * r + 9.6184369e-3f;
    p = p * r + 5.5503324e-2f;
    p = p * r + 2.4022648e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    Floats power = (Floats)((Bits)p + ((Bits)turns << 23));
    return x < -125.0f ? Floats{} : power;
}

// What weights are relative to before there was a score. Not minus infinity, which a score may be: less infinity it
// would be no number.
constexpr float LEAST = -__FLT_MAX__;

// Weights are relative to a score that no other exceeds by more than this, as a power of two: so it rarely changes.
constexpr float LEEWAY = 16;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// exp(x), the same but for a rounding of x.
inline Floats exponential(Floats x) { return power_of_two(x * LOG2_E); }
inline float exponential_one(float x) { return exponential(all(x))[0]; }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
#if KVC_WIDTH == 16
inline Floats evens(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline Floats odds(Floats a, Floats b) {
    return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline Floats interleave_low(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Floats interleave_high(Floats a, Floats b) {
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline Floats fold_pairs(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline Floats fold_quads(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline Floats fold_lanes(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif KVC_WIDTH == 8
inline Floats evens(Floats a, Floats b) { return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
inline Floats odds(Floats a, Floats b) { return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
inline Floats interleave_low(Floats a, Floats b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Floats interleave_high(Floats a, Floats b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Floats fold_pairs(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}
inline Floats fold_quads(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
inline Floats fold_lanes(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
inline Floats evens(Floats a, Floats b) { return SHUFFLE(a, b, 0, 2, 4, 6); }
inline Floats odds(Floats a, Floats b) { return SHUFFLE(a, b, 1, 3, 5, 7); }
inline Floats interleave_low(Floats a, Floats b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
inline Floats interleave_high(Floats a, Floats b) { return SHUFFLE(a, b, 2, 6, 3, 7); }
inline Floats fold_pairs(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
}
inline Floats fold_quads(Floats a, Floats b) {
    return SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7);
}
inline Floats fold_lanes(Floats a, Floats) { return a; }
#endif

// A square of W by W words, its rows for its columns. Each step takes the first bit of a row's number to the end of
// the column's, so that after as many steps as a number has bits they have changed places.
inline void transpose(Floats* square) {
    for (int step = 1; step < W; step *= 2) {
        Floats next[W];
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = interleave_low(square[i], square[i + W / 2]);
            next[2 * i + 1] = interleave_high(square[i], square[i + W / 2]);
        }
        for (int i = 0; i < W; i++) square[i] = next[i];
    }
}

// A register that has sum(from[i]) at i. Each step adds pairs of registers into one of half as many partial sums.
inline Floats four_sums(const Floats* from) {
    return fold_quads(fold_pairs(from[0], from[1]), fold_pairs(from[2], from[3]));
}

inline Floats sums_of(const Floats* from) {
    Floats a = four_sums(from);
#if KVC_WIDTH >= 8
    a = fold_lanes(a, four_sums(from + 4));
#endif
#if KVC_WIDTH == 16
    a = fold_lanes(a, fold_lanes(four_sums(from + 8), four_sums(from + 12)));
#endif
    return a;
}

// The greatest element.
#if KVC_WIDTH == 16
#define SWAPS(v, STEP) \
    v = STEP(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
    v = STEP(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
    v = STEP(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
    v = STEP(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif KVC_WIDTH == 8
#define SWAPS(v, STEP) \
    v = STEP(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3)); \
    v = STEP(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5)); \
    v = STEP(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
#define SWAPS(v, STEP) \
    v = STEP(v, SHUFFLE(v, v, 2, 3, 0, 1)); \
    v = STEP(v, SHUFFLE(v, v, 1, 0, 3, 2));
#endif
inline float greatest_in(Floats v) {
    SWAPS(v, greater)
    return v[0];
}
inline float sum_of(Floats v) {
#define PLUS(a, b) (a) + (b)
    SWAPS(v, PLUS)
    return v[0];
}

inline void prefetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i, 0, CACHE);
}

// The same for COUNT elements; a line is asked for once.
template <int COUNT, class T>
inline void prefetch(const T* from) {
    constexpr int BYTES = COUNT * sizeof(T);
    if (BYTES < LINE && (intptr_t)from % LINE >= BYTES) return;
    for (int i = 0; i < BYTES; i += LINE) __builtin_prefetch((const char*)from + i, 0, CACHE);
}

// 2 W elements of a query, in the order in which keys of type T are widened.
inline void arrange(Bf16, const Bf16* from, Floats& a, Floats& b) { widen(from, a, b); }
inline void arrange(float, const float* from, Floats& a, Floats& b) { widen(from, a, b); }
inline void arrange(Bf16, const float* from, Floats& a, Floats& b) {
    Floats x = load<Floats>(from), y = load<Floats>(from + W);
    a = evens(x, y);
    b = odds(x, y);
}
inline void arrange(float, const Bf16* from, Floats& a, Floats& b) {
    Floats even, odd;
    widen(from, even, odd);
    a = interleave_low(even, odd);
    b = interleave_high(even, odd);
}

// The same to memory, in the form that keys of type K are multiplied with; false where that would not be exact.
template <class K, class Q>
inline bool bring(K key, const Q* from, float* to) {
    Floats a, b;
    arrange(key, from, a, b);
    store(to, a);
    store(to + W, b);
    return true;
}
inline bool bring(Pairs, const Bf16* from, Pairs* to) {
    __builtin_memcpy(to, from, 2 * W * sizeof *to);
    return true;
}
inline bool bring(Pairs, const float* from, Pairs* to) {
    uint32_t rest = 0;
    for (int i = 0; i < 2 * W; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, from + i, sizeof bits);
        to[i].bits = bits >> 16;
        rest |= bits & 0xffff;
    }
    return rest == 0;
}

#ifdef KVC_PAIRS
// Each element of `sums` gets the products of two neighbours, exact, one after the other in float32. In assembler:
// not every compiler that knows AVX512 has an intrinsic for it.
inline Floats add_pairs(Floats sums, Bits a, Bits b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
}
#endif

// What was widened from type T, in the order of its elements again.
inline void restore(Bf16, Floats a, Floats b, float* to) {
    store(to, interleave_low(a, b));
    store(to + W, interleave_high(a, b));
}
inline void restore(float, Floats a, Floats b, float* to) {
    store(to, a);
    store(to + W, b);
}

}  // namespace
}  // namespace kvc
