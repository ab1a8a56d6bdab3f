// Layers one behind the other, of rows that attend over blocks here alone. Plain C layouts, as in attend.h.
#pragma once

#include "advance.h"

extern "C" {

// From the first of these layers' queries, keys and values to those of the layer behind the last one. What lies in memory
// of the call's own is undefined before it.
struct kvc_forward {
    const kvc_closing* const* closings;  // [layers], what ends each of them
    const kvc_opening* const* openings;  // [layers], what begins the layer behind each
    kvc_batch* const* batches;  // [layers], without queries and KV; null where the rows are a chunk's
    kvc_chunk* const* chunks;   // likewise; null where they are a batch's
    void* kv;              // of the first layer, [blocks, 2, kv_heads, block_tokens, dim] of the rows' type
    const int64_t* slots;  // [count, 2 * kv_heads], where a row's keys and values go in a layer's [rows, dim]
    const void* hidden;    // [count, hidden]
    const void* q;         // [count, heads, dim], heads in one piece, rows `q_row` elements apart
    const void* k;         // [count, kv_heads, dim]
    const void* v;
    const float* cos;      // as kvc_advance has them
    const float* sin;
    void* sum;             // as kvc_advance has them, of the last layer
    void* qkv;
    void* rotated;
    void* attended;        // [count, heads * dim], own
    void* space;           // of kvc_advance, own
    int64_t q_row, k_row, v_row;
    int64_t layers, layer_bytes, count, threads;
    int64_t attention_ns;  // out: how long attention took
    float epsilon;
    int32_t is_bf16, variant;
};

}  // extern "C"
