// What a slice of the model computes between its matrix products, each in one pass. Plain C layouts, as in attend.h.
#pragma once

#include "attend.h"

extern "C" {

// Rows of the residual stream: what is added to them, and their RMSNorm. Elements are of the model's type.
struct kvc_norm {
    const void* x;        // [rows, size]
    const void* added;    // [rows, size]; null: nothing is added
    const float* weight;  // [size]
    void* sum;            // [rows, size], x + added; not written where nothing is added
    void* out;            // [rows, size], of the sum as it is rounded
    int64_t rows, size, threads;
    float epsilon;
    int32_t is_bf16, variant;
};

// Rotary embedding of a row's first heads, and their RMSNorm before it; pairs lie half a head apart.
struct kvc_rotation {
    void* x;              // rows of `row` elements, heads of `dim` in each; normed in place
    const float* weight;  // [heads, dim], of the norm; null: heads are not normed
    const float* cos;     // [rows, dim / 2]
    const float* sin;
    void* out;            // [rows, heads, dim]
    int64_t rows, row, heads, dim, threads;
    float epsilon;
    int32_t is_bf16, variant;
};

// silu(gate) * up
struct kvc_gate {
    const void* x;  // [rows, 2, size], gate and up
    void* out;      // [rows, size]
    int64_t rows, size, threads;
    int32_t is_bf16, variant;
};

}  // extern "C"

namespace kvc {

struct SliceVariant {
    int width;  // sizes (half of `dim`) are multiples of twice that
    bool (*supported)();
    void (*norm)(const kvc_norm&, int64_t first_row, int64_t last_row);
    void (*rotate)(const kvc_rotation&, int64_t first_row, int64_t last_row);
    void (*gate)(const kvc_gate&, int64_t first_row, int64_t last_row);
    void (*narrow)(const float* from, void* to, int64_t count);
};

extern const SliceVariant slices_portable;
#if defined(__x86_64__)
extern const SliceVariant slices_avx2, slices_avx512;
#endif

}  // namespace kvc
