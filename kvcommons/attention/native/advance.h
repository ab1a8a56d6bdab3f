// From a layer's attention to the next layer's queries, keys and values, in one call. Plain C layouts, as in attend.h.
#pragma once

#include "attend.h"

extern "C" {

struct kvc_matrix {
    const void* packed;  // as kvc_product has it
    const void* bias;
    int64_t rows, size;
};

// What ends a layer, and what begins one: made once, for all calls.
struct kvc_closing {
    kvc_matrix output;   // [hidden, heads * dim]
    kvc_matrix gate_up;  // [2 * mlp, hidden]
    kvc_matrix down;     // [hidden, mlp]
    const float* norm;   // [hidden], of the MLP
};
struct kvc_opening {
    kvc_matrix qkv;        // [(heads + 2 * kv_heads) * dim, hidden]
    const float* norm;     // [hidden], of attention
    const float* qk_norm;  // [rotated_heads, dim]; null: heads are not normed
    int64_t rotated_heads, dim;
};

struct kvc_advance {
    const kvc_closing* closing;
    const kvc_opening* opening;
    const void* hidden;    // [count, hidden]
    const void* attended;  // [count, heads * dim]
    const float* cos;      // [count, dim / 2]
    const float* sin;
    void* sum;             // [count, hidden], the residual stream before the next layer
    void* qkv;             // [count, rows of qkv]
    void* rotated;         // [count, rotated_heads, dim]
    void* space;           // kvc_advance_bytes, aligned to 64
    int64_t count, threads;
    float epsilon;
    int32_t is_bf16, variant;
};

}  // extern "C"
